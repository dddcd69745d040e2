"""
MySQL and MariaDB, for the backend and the guard.

    url        from a URL and options to the parts that the driver takes
    writers    several servers that take writes, which no row lock spans
    driver     the part of asyncmy that is used, with types: one open connection, and the code of an error
"""
