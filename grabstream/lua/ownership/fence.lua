#!lua flags=allow-oom
-- Fences a shard: it decides nothing until it is reconciled. Clears its server epoch and history, and stores
-- the reason.
--
-- KEYS[1] shard hash
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] reason in words
-- Returns 1, or the error LOST when the shard has another owner.
--- @include "shard"

local lost = lost_ownership()
if lost then return lost end
redis.call('HDEL', KEYS[1], 'server_epoch', 'history')
redis.call('HSET', KEYS[1], 'fault', ARGV[4])
return 1
