#!lua flags=allow-oom
-- Reads what the sweeper of a shard has to do, and when. And lets a shard be rebuilt if a key of it has a
-- type that no script makes: all scripts that use the key would fail, as long as it exists.
--
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- Returns a list: the server's time; when the first hold ends, when the first offer is due, when the first of
--         the retired offers retired ('' for none; all in milliseconds since 1970 UTC); the number of
--         campaigns with records to delete; the number of counts of refusals. Or the error DAMAGED, with the
--         key, after which the shard decides nothing until its relay has rebuilt it.
--- @include "shard"

local TYPES = {
  'hash', 'stream', 'hash', 'list', 'hash', 'zset', 'set', 'zset', 'hash', 'set', 'zset', 'hash',
}
-- The command that counts the members of a key; it fails for a key of another type.
local COUNTS = {hash = 'HLEN', stream = 'XLEN', list = 'LLEN', zset = 'ZCARD', set = 'SCARD'}

-- Fences the shard, and records it as incomplete. One that another program writes is left unchanged.
local function fence_damaged(reason, is_state)
  if is_state then
    redis.call('DEL', KEYS[1])
    return
  end
  local held = redis.call('HMGET', KEYS[1], 'layout', 'seq', 'partial')
  if held[3] or layout_of(held[1], held[2]) ~= LAYOUT then return end
  redis.call('HDEL', KEYS[1], 'server_epoch', 'history')
  redis.call('HSET', KEYS[1], 'partial', '1', 'fault', reason)
end

local counts = {}
for i = 1, #TYPES do
  counts[i] = redis.pcall(COUNTS[TYPES[i]], KEYS[i])
  if type(counts[i]) == 'table' then
    local kind = redis.call('TYPE', KEYS[i]).ok
    if kind == TYPES[i] or kind == 'none' then return counts[i] end
    local reason = string.format('the key %s has the type %s, which no program gives it: ', KEYS[i], kind)
      .. 'the shard is rebuilt from the journal'
    fence_damaged(reason, i == 1)
    return redis.error_reply('DAMAGED ' .. reason)
  end
end

local function first_of(i)
  return counts[i] > 0 and redis.call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES')[2] or ''
end

return {time_of_server(), first_of(8), first_of(6), first_of(11), counts[12], counts[5]}
