#!lua flags=no-writes
-- Reads the outbox from a given event on, for the shard's owner only.
--
-- KEYS[1] shard hash · KEYS[2] outbox stream
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] first seq wanted · ARGV[5] entries at most
-- Returns {seq of the shard, entries, '1' when the shard is incomplete, else ''}: stream entries {id, {'e',
--         line, 'e', line, …}} in order, from the entry that holds the first seq wanted, with the number of
--         its grabs in place of 'e' where the line is a run; entries end when LINES_MAX or BYTES_MAX is
--         reached. Or the error LOST when the shard has another owner.
--- @include "shard"

-- Lua hashes every line that it reads. An entry that begins below a bound is read whole.
local LINES_MAX, BYTES_MAX = 1000, 131072

if not is_owner(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then
  return redis.error_reply('LOST the shard has another owner, term or server epoch')
end
local entries, lines, bytes = {}, 0, 0
local entry = redis.call('XREVRANGE', KEYS[2], ARGV[4] .. '-0', '-', 'COUNT', 1)[1]
  or redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
while entry do
  entries[#entries + 1] = entry
  lines = lines + #entry[2] / 2
  for i = 2, #entry[2], 2 do bytes = bytes + #entry[2][i] end
  if #entries >= tonumber(ARGV[5]) or lines >= LINES_MAX or bytes >= BYTES_MAX then break end
  entry = redis.call('XRANGE', KEYS[2], '(' .. entry[1], '+', 'COUNT', 1)[1]
end
local shard = redis.call('HMGET', KEYS[1], 'seq', 'partial')
return {shard[1] or '0', entries, shard[2] or ''}
