"""The ground: claims, grants, timing and names. No I/O happens here."""
