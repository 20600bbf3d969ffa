#!lua flags=no-writes
-- The life of the server that has a key, see includes/shard.lua.
--
-- KEYS[1] any key
-- Returns the life.
--- @include "shard"

local _ = KEYS[1]
return life_of_server()
