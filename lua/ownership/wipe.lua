#!lua flags=allow-oom
-- Keys of a shard that is to be rebuilt are deleted, a bounded number a call; of the shard itself only term
-- and owner stay.
--
-- KEYS[1] shard hash · KEYS[2 …] keys to delete
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] reason in words
-- Returns 1, or the error LOST when another took the shard over.
--- @include "shard"

if not is_owner(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then
  return redis.error_reply('LOST the shard has another owner, term or life')
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'term', ARGV[1], 'owner', ARGV[2], 'partial', '1', 'fault', ARGV[4])
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
