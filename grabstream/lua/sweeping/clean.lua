#!lua flags=allow-oom
-- Deletes records of retired offers, in bounded steps. They already count as forgotten, so the time of the
-- deletion does not matter.
--
-- Command: none; the sweeper calls it for a campaign as long as the cleaning hash names it.
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13] the campaign's answers hash, or its payments hash · KEYS[14] its state hash
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] campaign · ARGV[7] answers or payments · ARGV[8] fields per step
-- Outcomes: 21 fenced (whole call)
-- Events: none
-- Returns msgpack: {0, history, {number of records deleted}}, or {code, retry_at, message}.
--- @include "cost"
--- @include "packed_values"
--- @include "decide"

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

local campaign, field, cleans_answers = ARGV[6], ARGV[6] .. '/' .. ARGV[7], ARGV[7] == 'answers'
local progress = redis.call('HGET', KEYS[12], field)
if not progress then return cmsgpack.pack({0, call.history, {0}}) end
-- Another server has another order of fields, so the pass restarts; so it does where its progress is damaged.
local history, cursor, again = string.match(progress, '^(%d+):(%d+):(%d)$')
if tonumber(history) ~= call.history or #cursor > 20 then cursor, again = '0', again or '0' end

-- An answer counts until its offer retires; a payment counts while its offer exists or a record of the
-- retired offer is kept.
local function is_over(record)
  if cleans_answers then return has_retired(call, offer_of_answer(record, campaign)) end
  local name = cmsgpack.unpack(record)[1]
  return has_retired(call, name) and redis.call('HEXISTS', KEYS[14], 'retired/' .. name) == 0
end

-- Records are read whole. So where a campaign has large answers, they are read one by one; else the number
-- read at once doubles.
local is_large = cleans_answers and redis.call('HGET', KEYS[14], 'large')
local over, seen, at_once = {}, 0, 1
repeat
  local scanned = redis.call('HSCAN', KEYS[13], cursor, 'COUNT', at_once)
  cursor, at_once = scanned[1], is_large and 1 or 2 * at_once
  for i = 1, #scanned[2], 2 do
    local record = scanned[2][i + 1]
    spend(COST.scanned + COST.line_byte * #record)
    if is_over(record) then over[#over + 1] = scanned[2][i] end
  end
  seen = seen + #scanned[2] / 2
until cursor == '0' or seen >= tonumber(ARGV[8]) or is_spent()
write_in_pieces('HDEL', KEYS[13], over)
if cursor ~= '0' then
  write('HSET', KEYS[12], field, string.format('%d:%s:%s', call.history, cursor, again))
elseif again == '1' then
  write('HSET', KEYS[12], field, '0:0:0')
else
  write('HDEL', KEYS[12], field)
end
local reply = cmsgpack.pack({0, call.history, {#over}})
commit()
return reply
