"""What ``GDSBuilder().load()`` returns: the handle for GPUDirect Storage."""

from forebay.gds import gds_handle

__all__ = ["gds_handle"]
