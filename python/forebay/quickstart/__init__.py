"""``forebay quickstart``: the main job on real tensors, beside the ways people use today.

Stores and loads the same tensors through Forebay and through its rivals, interleaved, reads from
a cold cache, writes synced, every byte compared. Nothing here is imported by ``import forebay``.
"""

from forebay.quickstart.main import run

__all__ = ["run"]
