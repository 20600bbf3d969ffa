#!lua flags=allow-oom
-- Fences a shard: it decides nothing until it is reconciled. Clears its server epoch and history, and stores
-- the reason.
--
-- KEYS[1] shard hash
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] reason in words
-- Returns 1, or the error LOST when the shard has another owner.
--- @include "shard"

if not is_owner(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then
  return redis.error_reply('LOST the shard has another owner, term or server epoch')
end
redis.call('HDEL', KEYS[1], 'server_epoch', 'history')
redis.call('HSET', KEYS[1], 'fault', ARGV[4])
return 1
