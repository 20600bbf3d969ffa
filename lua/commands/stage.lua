#!lua
-- A piece of an envelope's parts, staged for the call of `open` that takes them. Every attempt has a key of
-- its own.
--
-- KEYS[1] staged string
-- ARGV[1] offset bytes · ARGV[2] piece ·
--   ARGV[3] server epoch under which the pieces before this were staged, or '' for the first ·
--   ARGV[4] time to live ms
-- Returns the server's epoch, or '' when the pieces before are gone, or may be.
--- @include "shard"

local epoch = server_epoch()
if ARGV[3] ~= '' and (ARGV[3] ~= epoch or redis.call('EXISTS', KEYS[1]) == 0) then return '' end
redis.call('SETRANGE', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return epoch
