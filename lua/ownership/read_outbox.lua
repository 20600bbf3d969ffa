#!lua flags=no-writes
-- The outbox from an event on, for the shard's owner only.
--
-- KEYS[1] shard hash · KEYS[2] outbox stream
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] first seq wanted · ARGV[5] entries at most
-- Returns {seq of the shard, entries, '1' when the shard is incomplete, else ''}: stream entries {id, {'e',
--         line, 'e', line, …}} in order, from the one that holds the first seq wanted, no further one after
--         so many lines or bytes; or the error LOST when another took the shard over.
--- @include "shard"

-- Every line is hashed where it becomes a string of Lua; an entry that begins below the bound is read whole.
local LINES_MAX, BYTES_MAX = 1000, 131072

if not is_owner(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then
  return redis.error_reply('LOST the shard has another owner, term or life')
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
