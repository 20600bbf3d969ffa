#!lua
-- Offers created and funded. The parts drawn ahead come from the caller, who computed them from the seed.
--
-- Command: open
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list · KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set
-- KEYS[8 + 4i] offer hash · KEYS[9 + 4i] users hash · KEYS[10 + 4i] parts string · KEYS[11 + 4i] answers hash, of the i-th command
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms · ARGV[5] outbox events max
-- ARGV[6] msgpack: list of {id, offer, campaign, digest, terms}; terms: kind, issuer, funding, asset, total, parts, law, min, max,
--         draw, opens_at, closes_at (0: not said), life_ms, seed, seed_sha256, sealed_seed, json
-- ARGV[7 + i] parts of the i-th offer, 6 bytes each, or '' when they are drawn at the grab
-- Outcomes: 21 fenced · 22 busy (whole call) · 23 conflict (also: the offer exists) · 20 invalid · 5 opened
-- Events: offer.opened
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "shard"
--- @include "records"
--- @include "decide"
--- @include "repeats"
--- @include "offers"

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

local function opened_line(offer, id, digest, terms)
  return event_head(call, offer, 'offer.opened', id) .. ',"kind":"' .. terms.kind .. '","issuer":"' .. terms.issuer
    .. '","funding":"' .. terms.funding .. '","asset":"' .. terms.asset .. '","total":' .. terms.total
    .. ',"opens_at":' .. offer.opens_at .. ',"closes_at":' .. offer.closes_at .. ',"terms":' .. terms.json
    .. ',"seed_sha256":"' .. terms.seed_sha256 .. '","sealed_seed":"' .. terms.sealed_seed
    .. '","digest":"' .. digest .. '"}'
end

local made, seen, rows = {}, {}, {}
for i, command in ipairs(cmsgpack.unpack(ARGV[6])) do
  local id, name, campaign, digest, terms = unpack(command)
  local base = 4 + 4 * i
  local field, record_field = refusal_field(campaign, id), KEYS[base + 3] .. id
  local record = seen[record_field] or redis.call('HGET', KEYS[base + 3], id)
  local row = repeated_row(record, redis.call('HGET', KEYS[3], field), digest, call.now)
  if not row and (seen[KEYS[base]] or redis.call('EXISTS', KEYS[base]) == 1) then row = {CONFLICT, 0, call.now} end
  if not row then
    local opens_at = terms.opens_at == 0 and call.now or terms.opens_at
    local closes_at = terms.closes_at == 0 and opens_at + terms.life_ms or terms.closes_at
    if closes_at <= opens_at then
      row = {INVALID, 0, call.now}
    else
      local offer = {name = name, offer_seq = 0, opens_at = opens_at, closes_at = closes_at}
      call.lines[#call.lines + 1] = opened_line(offer, id, digest, terms)
      record = pack_answer(5, call.seq, call.now, terms.parts, terms.total, digest, offer_tail(name))
      seen[record_field], seen[KEYS[base]] = record, true
      made[#made + 1] = {base, name, id, record, terms, offer, ARGV[6 + i]}
      row = {5, call.seq, call.now, terms.total, 0, 0, terms.parts}
    end
  end
  rows[i] = row
end

append_events(call)
for _, entry in ipairs(made) do
  local base, name, id, record, terms, offer, parts = unpack(entry)
  redis.call('HSET', KEYS[base], 'state', 'open', 'paused', '0', 'kind', terms.kind, 'issuer', terms.issuer,
    'asset', terms.asset, 'total', string.format('%.0f', terms.total), 'parts', string.format('%.0f', terms.parts),
    'amount_left', string.format('%.0f', terms.total), 'units_left', string.format('%.0f', terms.parts), 'places', '0',
    'offer_seq', '1', 'law', terms.law, 'min', string.format('%.0f', terms.min), 'max', string.format('%.0f', terms.max),
    'draw', terms.draw, 'seed', terms.seed, 'opens_at', string.format('%.0f', offer.opens_at),
    'closes_at', string.format('%.0f', offer.closes_at))
  if parts ~= '' then redis.call('SET', KEYS[base + 2], parts) end
  redis.call('HSET', KEYS[base + 3], id, record)
  redis.call('ZADD', KEYS[6], string.format('%.0f', offer.closes_at), name)
  redis.call('SADD', KEYS[7], name)
end
return cmsgpack.pack({0, call.history, rows})
