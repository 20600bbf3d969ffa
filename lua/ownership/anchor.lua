#!lua flags=allow-oom
-- The journal was restored and its offsets are new: what was acknowledged before stands elsewhere. Nothing is
-- trimmed or announced.
--
-- KEYS[1] shard hash
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] last seq acknowledged ·
--   ARGV[5] the chain's hash there, hex
-- ARGV[6] journal offset behind it now · ARGV[7] term · ARGV[8] owner of the record before that offset
-- ARGV[9] last seq acknowledged before: ARGV[4], or a later one that the restored journal has not
-- Returns 1, or the error LOST when another took the shard over or has acknowledged more.
--- @include "shard"

if not is_owner(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then
  return redis.error_reply('LOST the shard has another owner, term or life')
end
if (redis.call('HGET', KEYS[1], 'journaled_seq') or '0') ~= ARGV[9] then
  return redis.error_reply('LOST the shard has moved on')
end
redis.call('HSET', KEYS[1], 'journaled_seq', ARGV[4], 'journaled_head', ARGV[5], 'journaled_offset', ARGV[6],
  'journaled_term', ARGV[7], 'journaled_owner', ARGV[8])
return 1
