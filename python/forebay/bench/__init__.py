"""``forebay bench``: Forebay beside what else is installed, on the user's directory.

Each subject has a process of its own, which lives through all rounds; the tensors are in memory
that all of them share. What ``forebay quickstart`` needs of this, it takes from here. Nothing here
is imported by ``import forebay``.
"""
