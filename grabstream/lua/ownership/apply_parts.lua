#!lua flags=allow-oom
-- Writes a piece of an envelope's parts to a shard that is being recovered, before the event that opens the
-- offer is applied. The parts follow from that event, so a piece may be written twice.
--
-- KEYS[1] shard hash · KEYS[2] parts string
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] offset bytes · ARGV[5] piece
-- Returns 1, or the error LOST when the shard has another owner or is not fenced.
--- @include "shard"

if not is_owner(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then
  return redis.error_reply('LOST the shard has another owner, term or server epoch')
end
if redis.call('HGET', KEYS[1], 'server_epoch') then
  return redis.error_reply('LOST the shard is not fenced')
end
redis.call('SETRANGE', KEYS[2], ARGV[4], ARGV[5])
return 1
