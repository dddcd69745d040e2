-- Lines of tickets of fencing_sdk: fencing_sdk/abc/line.py has the rules. Texts that a caller chooses are bytes, so no
-- collation takes two names for one; moments are microseconds since 1970 by the server's clock.

-- One row for each name, and in it the first ticket of the line while there is no other. It stays for a while when the name
-- is free.
CREATE TABLE IF NOT EXISTS fencing_line (
    name    VARBINARY(512) NOT NULL PRIMARY KEY,
    last    BIGINT NOT NULL DEFAULT 0,        -- the last token
    drawn   BIGINT NOT NULL DEFAULT 0,        -- tickets drawn into fencing_ticket
    others  TINYINT NOT NULL DEFAULT 0,       -- 1: that table may have rows of this name
    number  BIGINT NOT NULL DEFAULT 0,        -- even; the ticket of this row began to hold when it was drawn
    owner   VARBINARY(255) NOT NULL DEFAULT '',
    mode    VARBINARY(16) NOT NULL DEFAULT '',
    width   BIGINT NOT NULL DEFAULT 0,
    label   MEDIUMBLOB,
    client  VARBINARY(32) NOT NULL DEFAULT '',
    token   BIGINT,
    permit  BIGINT,
    dies    BIGINT NOT NULL DEFAULT 0,        -- 0: there is no ticket in this row
    longest BIGINT NOT NULL DEFAULT 0,
    since   BIGINT NOT NULL DEFAULT 0
) ENGINE=InnoDB;

-- The other tickets of a line, in the order of their numbers, and those that an operator has ended.
CREATE TABLE IF NOT EXISTS fencing_ticket (
    name    VARBINARY(512) NOT NULL,
    number  BIGINT NOT NULL,                  -- odd, unless it was that of a row in fencing_line
    owner   VARBINARY(255) NOT NULL,
    mode    VARBINARY(16) NOT NULL,
    width   BIGINT NOT NULL,
    label   MEDIUMBLOB,
    client  VARBINARY(32) NOT NULL,           -- whose bell rings
    token   BIGINT,                           -- NULL: it waits
    permit  BIGINT,
    dies    BIGINT NOT NULL,
    longest BIGINT NOT NULL,                  -- the longest life it was ever asked for
    since   BIGINT NOT NULL,
    ended   MEDIUMBLOB,                       -- an operator's reason: it is in the line no longer
    PRIMARY KEY (name, number),
    KEY fencing_ticket_owner (name, owner)
) ENGINE=InnoDB;

-- The messages for clients that sleep until someone rings.
CREATE TABLE IF NOT EXISTS fencing_bell (
    id      BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    client  VARBINARY(32) NOT NULL,
    message VARBINARY(255) NOT NULL,
    sent    BIGINT NOT NULL,
    KEY fencing_bell_client (client)
) ENGINE=InnoDB;
