#!lua flags=allow-oom
-- Stores a new checkpoint after the journal was restored with new offsets: the acknowledged events are now at
-- other offsets. Trims and announces nothing.
--
-- KEYS[1] shard hash
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] last seq acknowledged ·
--   ARGV[5] the chain's hash there, hex
-- ARGV[6] new journal offset after it · ARGV[7] term · ARGV[8] owner of the record before that offset
-- ARGV[9] last seq acknowledged before: ARGV[4], or a later seq that the restored journal lacks
-- Returns 1, or the error LOST when the shard has another owner or another checkpoint.
--- @include "shard"

local lost = lost_ownership()
if lost then return lost end
if (redis.call('HGET', KEYS[1], 'journaled_seq') or '0') ~= ARGV[9] then
  return redis.error_reply('LOST the shard has changed')
end
redis.call('HSET', KEYS[1], 'journaled_seq', ARGV[4], 'journaled_head', ARGV[5], 'journaled_offset', ARGV[6],
  'journaled_term', ARGV[7], 'journaled_owner', ARGV[8])
return 1
