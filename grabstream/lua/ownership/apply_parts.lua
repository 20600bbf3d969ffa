#!lua flags=allow-oom
-- Writes a piece of an envelope's parts to a shard that is being recovered, before the event that opens the
-- offer is applied. The parts follow from that event, so a piece may be written twice.
--
-- KEYS[1] shard hash · KEYS[2] parts string
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] offset bytes · ARGV[5] piece
-- Returns 1, or the error LOST when the shard has another owner or is not fenced.
--- @include "shard"

local lost = lost_or_deciding()
if lost then return lost end
redis.call('SETRANGE', KEYS[2], ARGV[4], ARGV[5])
return 1
