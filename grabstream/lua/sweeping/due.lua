#!lua flags=no-writes
-- Reads what the sweeper of a shard has to do, and when.
--
-- KEYS[1] holds sorted set · KEYS[2] due sorted set · KEYS[3] past sorted set · KEYS[4] cleaning hash
-- KEYS[5] demand hash
-- Returns a list: the server's time; when the first hold ends, when the first offer is due, when the first of
--         the retired offers retired ('' for none; all in milliseconds since 1970 UTC); the number of
--         campaigns with records to delete; the number of counts of refusals.
--- @include "shard"

local function first_of(key)
  return redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or ''
end

return {
  time_of_server(), first_of(KEYS[1]), first_of(KEYS[2]), first_of(KEYS[3]),
  redis.call('HLEN', KEYS[4]), redis.call('HLEN', KEYS[5]),
}
