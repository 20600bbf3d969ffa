#!lua flags=allow-oom
-- Deletes keys of a shard that is to be rebuilt, a bounded number per call. Of the shard hash, only term,
-- owner, `plain` and `clock` remain; it gets the layout in which the shard is rebuilt.
--
-- KEYS[1] shard hash · KEYS[2 …] keys to delete
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] reason in words
-- Returns 1, or the error LOST when the shard has another owner.
--- @include "shard"

local lost = lost_ownership()
if lost then return lost end
local plain, clock = unpack(redis.call('HMGET', KEYS[1], 'plain', 'clock'))
redis.call('DEL', KEYS[1])
if plain then redis.call('HSET', KEYS[1], 'plain', plain) end
if clock then redis.call('HSET', KEYS[1], 'clock', clock) end
redis.call('HSET', KEYS[1], 'term', ARGV[1], 'owner', ARGV[2], 'partial', '1', 'fault', ARGV[4], 'layout',
  LAYOUT)
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
