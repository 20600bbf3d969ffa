#!lua flags=allow-oom
-- The last step of a recovery: the shard equals the journal or is ahead of it, so it may decide again, in a
-- new history.
--
-- KEYS[1] shard hash
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] seq of the shard that was compared ·
--   ARGV[5] number of shards
-- Returns 1, or the error LOST when the shard has another owner, another seq or is incomplete.
--- @include "shard"

local lost = lost_ownership()
if lost then return lost end
if (redis.call('HGET', KEYS[1], 'seq') or '0') ~= ARGV[4] then
  return redis.error_reply('LOST the shard has changed')
end
if redis.call('HEXISTS', KEYS[1], 'partial') == 1 then
  return redis.error_reply('LOST the shard is incomplete')
end
redis.call('HSET', KEYS[1], 'server_epoch', ARGV[3], 'history', ARGV[1], 'seq', ARGV[4], 'shards', ARGV[5],
  'layout', LAYOUT)
redis.call('HDEL', KEYS[1], 'fault')
return 1
