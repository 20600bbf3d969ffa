#!lua flags=allow-oom
-- The first step of a takeover: sets a higher term, and the random owner id of this attempt
-- (docs/protocol.md, step 1).
--
-- KEYS[1] shard hash
-- ARGV[1] term that must be exceeded · ARGV[2] owner id ·
--   ARGV[3] why the owner runs plain scripts in place of functions; '' or absent if it uses functions
-- Returns {term, server epoch, server epoch in which the shard was last reconciled or '', seq, form of its
--         state: complete, partial (a rebuild was interrupted) or outdated (an older key layout than these
--         scripts write)}; or the error NEWER when a newer program has written the shard, or DAMAGED when
--         its layout is unknown. A damaged term counts as none, as in an emptied Redis: the journal has the
--         highest one.
--- @include "shard"

local held = redis.call('HMGET', KEYS[1], 'term', 'server_epoch', 'layout', 'seq', 'partial')
local layout = layout_of(held[3], held[4])
if held[3] and not number_in(held[3]) then
  local reason = 'the field layout of the shard (' .. KEYS[1]
    .. ') has a value that no program writes: set it to that of another shard'
  redis.call('HDEL', KEYS[1], 'server_epoch', 'history')
  redis.call('HSET', KEYS[1], 'fault', reason)
  return redis.error_reply('DAMAGED ' .. reason)
end
if layout > LAYOUT then
  return redis.error_reply(string.format(
    'NEWER the shard has key layout %d, this program writes layout %d: upgrade it', layout, LAYOUT))
end
local term = string.format('%d', math.max(number_in(held[1]) or 0, tonumber(ARGV[1])) + 1)
local form = held[5] and 'partial' or (layout < LAYOUT and 'outdated' or 'complete')
local epoch = server_epoch()
redis.call('HSET', KEYS[1], 'term', term, 'owner', ARGV[2])
if (ARGV[3] or '') ~= '' then
  redis.call('HSET', KEYS[1], 'plain', ARGV[3])
else
  redis.call('HDEL', KEYS[1], 'plain')
end
return {term, epoch, held[2] or '', held[4] or '0', form}
