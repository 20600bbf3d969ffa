-- An offer's state as a table, what closes it, and the texts of its events.
-- Needs the includes `decide` and `records`.

-- Where an offer shares its campaign with others, its answers say which offer they are about.
local function offer_tail(name)
  return string.find(name, ':', 1, true) and name or ''
end

-- The state of an offer, or nil when there is none under this id.
local function load_offer(name, key)
  local f = redis.call('HMGET', key, 'state', 'paused', 'opens_at', 'closes_at', 'asset', 'parts', 'amount_left',
    'units_left', 'places', 'offer_seq', 'law', 'min', 'max', 'draw', 'seed', 'issuer', 'reason')
  if not f[1] then return nil end
  return {
    name = name, key = key, closed = f[1] == 'closed', paused = f[2] == '1',
    opens_at = tonumber(f[3]), closes_at = tonumber(f[4]), asset = f[5], parts = tonumber(f[6]),
    amount_left = tonumber(f[7]), units_left = tonumber(f[8]), places = tonumber(f[9]), offer_seq = tonumber(f[10]),
    law = f[11], min = tonumber(f[12]), max = tonumber(f[13]), draw = f[14], seed = f[15], issuer = f[16], reason = f[17],
    answers = {}, users = {}, tail = offer_tail(name),
  }
end

-- The beginning of every event's text, up to the fields of its type. Takes the next seq of shard and offer.
local function event_head(call, offer, type, command)
  offer.offer_seq = offer.offer_seq + 1
  return '{"type":"' .. type .. '","v":1,"shard":' .. call.shard .. ',"seq":' .. next_seq(call) .. ',"offer_seq":'
    .. offer.offer_seq .. ',"offer":"' .. offer.name .. '","at":' .. call.now .. ',"command":"' .. command .. '"'
end

-- Ends an offer: what is left goes to the issuer's wallet, the seed is revealed. `digest` is nil when no command asked for it.
local function close_offer(call, offer, reason, command, digest)
  call.lines[#call.lines + 1] = event_head(call, offer, 'offer.closed', command)
    .. ',"reason":"' .. reason .. '","asset":"' .. offer.asset .. '","amount":' .. offer.amount_left
    .. ',"left":' .. offer.units_left .. ',"refund_to":"wallet:' .. offer.issuer .. '","seed":"' .. offer.seed .. '"'
    .. (digest and ',"digest":"' .. digest .. '"}' or '}')
  offer.closed, offer.paused, offer.reason = true, false, reason
  offer.amount_left, offer.units_left = 0, 0
end

-- Writes an offer back, and the records that were made for it. `answers_key` is its campaign's hash.
local function write_offer(call, offer, users_key, parts_key, answers_key)
  if #offer.answers > 0 then redis.call('HSET', answers_key, unpack(offer.answers)) end
  if #offer.users > 0 then redis.call('HSET', users_key, unpack(offer.users)) end
  redis.call('HSET', offer.key, 'state', offer.closed and 'closed' or 'open', 'paused', offer.paused and '1' or '0',
    'amount_left', string.format('%.0f', offer.amount_left), 'units_left', string.format('%.0f', offer.units_left),
    'places', string.format('%.0f', offer.places), 'offer_seq', string.format('%.0f', offer.offer_seq))
  if offer.closed then
    redis.call('HSET', offer.key, 'reason', offer.reason)
    redis.call('UNLINK', parts_key)
    redis.call('ZREM', KEYS[6], offer.name)
  end
end
