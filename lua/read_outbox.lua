#!lua flags=no-writes
-- The outbox from an event on, for the shard's owner only.
--
-- KEYS[1] shard hash · KEYS[2] outbox stream
-- ARGV[1] term · ARGV[2] owner · ARGV[3] life · ARGV[4] first seq wanted · ARGV[5] entries at most
-- Returns {seq of the shard, entries, '1' when the shard is incomplete, else ''}: stream entries {id, {'e', line, 'e', line, …}} in order,
--         from the one that holds the first seq wanted, no further one after so many lines or bytes; or the error LOST when another
--         took the shard over.
--- @include "shard"

local LINES_MAX, BYTES_MAX = 1000, 1048576

if not is_owner(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then return redis.error_reply('LOST the shard has another owner, term or life') end
local from = redis.call('XREVRANGE', KEYS[2], ARGV[4] .. '-0', '-', 'COUNT', 1)
local start = from[1] and from[1][1] or '-'
local entries, lines, bytes = {}, 0, 0
while #entries < tonumber(ARGV[5]) and lines < LINES_MAX and bytes < BYTES_MAX do
  local entry = redis.call('XRANGE', KEYS[2], start, '+', 'COUNT', 1)[1]
  if not entry then break end
  entries[#entries + 1] = entry
  start = '(' .. entry[1]
  lines = lines + #entry[2] / 2
  for i = 2, #entry[2], 2 do bytes = bytes + #entry[2][i] end
end
local shard = redis.call('HMGET', KEYS[1], 'seq', 'partial')
return {shard[1] or '0', entries, shard[2] or ''}
