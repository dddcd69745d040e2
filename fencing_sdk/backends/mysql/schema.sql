-- Locks of fencing_sdk. Texts that a caller chooses are bytes, so no collation takes two names for one; moments are
-- microseconds since 1970 by the server's clock.

-- One row for each lock. It stays for a while when the lock is free.
CREATE TABLE IF NOT EXISTS fencing_lock (
    name       VARBINARY(512) NOT NULL PRIMARY KEY,
    token      BIGINT NOT NULL,      -- the last one granted
    held_until BIGINT NOT NULL,      -- when the last grant ends, or has ended
    grants     MEDIUMTEXT CHARACTER SET ascii COLLATE ascii_bin NOT NULL  -- a JSON array: who holds it
) ENGINE=InnoDB;

-- The waiters of each lock, in the order of their numbers.
CREATE TABLE IF NOT EXISTS fencing_waiter (
    number       BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    name         VARBINARY(512) NOT NULL,
    owner        VARBINARY(255) NOT NULL,
    waiter_group VARBINARY(32) NOT NULL,  -- those that one client keeps alive together
    box          VARBINARY(32) NOT NULL,  -- whose bell wakes it
    ticket       VARBINARY(32) NOT NULL,  -- by which message
    mode         VARBINARY(16) NOT NULL,
    permits      BIGINT,
    since        BIGINT NOT NULL,
    label     MEDIUMBLOB,
    UNIQUE KEY fencing_waiter_owner (name, owner),
    KEY fencing_waiter_group (waiter_group)
) ENGINE=InnoDB;

-- The last sign of life of each group of waiters.
CREATE TABLE IF NOT EXISTS fencing_sign (
    waiter_group VARBINARY(32) NOT NULL PRIMARY KEY,
    seen         BIGINT NOT NULL
) ENGINE=InnoDB;

-- Why grants were ended, for holders that have not read it yet.
CREATE TABLE IF NOT EXISTS fencing_revoked (
    name   VARBINARY(512) NOT NULL,
    owner  VARBINARY(255) NOT NULL,
    until  BIGINT NOT NULL,
    reason MEDIUMBLOB NOT NULL,
    PRIMARY KEY (name, owner)
) ENGINE=InnoDB;

-- The messages for clients that sleep until someone rings.
CREATE TABLE IF NOT EXISTS fencing_bell (
    id      BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    client  VARBINARY(32) NOT NULL,
    message VARBINARY(64) NOT NULL,
    sent    BIGINT NOT NULL,
    KEY fencing_bell_client (client)
) ENGINE=InnoDB;
