#!lua flags=no-writes
-- Reads the clock of the server that has a key: in a cluster, another server has another clock, and may not
-- answer.
--
-- KEYS[1] any key
-- Returns milliseconds since 1970 UTC.
--- @include "shard"

local _ = KEYS[1]
return time_of_server()
