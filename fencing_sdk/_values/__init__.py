"""The ground: what is asked, granted, timed and named. No I/O happens here."""
