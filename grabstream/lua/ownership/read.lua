#!lua flags=no-writes
-- Runs a reading command, for the shard's owner only: it reads from the server of the takeover, also while
-- other connections of the same client lead to another server.
--
-- KEYS[1] shard hash · KEYS[2] key to read (SCAN has none)
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] HMGET, TYPE, HSCAN or SCAN ·
--   ARGV[5] number of its arguments after the key · ARGV[6 …] these
-- Returns the reply of the command; or the error LOST when the shard has another owner.
--- @include "shard"

local lost = lost_ownership()
if lost then return lost end
local command, last = ARGV[4], 5 + tonumber(ARGV[5])
if command == 'SCAN' then return redis.call('SCAN', unpack(ARGV, 6, last)) end
if command ~= 'HMGET' and command ~= 'TYPE' and command ~= 'HSCAN' then
  return redis.error_reply('READ runs HMGET, TYPE, HSCAN and SCAN only')
end
return redis.call(command, KEYS[2], unpack(ARGV, 6, last))
