#!lua flags=no-writes
-- Reads the epoch of the server that has a key, see includes/shard.lua.
--
-- KEYS[1] any key
-- Returns the server epoch.
--- @include "shard"

local _ = KEYS[1]
return server_epoch()
