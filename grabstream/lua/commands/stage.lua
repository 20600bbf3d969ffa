#!lua
-- Stages a piece of an envelope's parts for the call of `open` that takes them. Every attempt has another
-- key.
--
-- KEYS[1] staged string
-- ARGV[1] offset bytes · ARGV[2] piece ·
--   ARGV[3] server epoch in which the earlier pieces were staged, or '' for the first piece ·
--   ARGV[4] time to live ms
-- Returns the server epoch, or '' when the earlier pieces are lost, or may be.
--- @include "shard"

local epoch = server_epoch()
if ARGV[3] ~= '' and (ARGV[3] ~= epoch or redis.call('EXISTS', KEYS[1]) == 0) then return '' end
redis.call('SETRANGE', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return epoch
