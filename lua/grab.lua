#!lua
-- Grabs of one shard, decided in order, with their events, in one call.
--
-- Command: grab
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list · KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set
-- KEYS[8 + 3i] offer hash · KEYS[9 + 3i] users hash · KEYS[10 + 3i] parts string, for the i-th offer of the batch, from 0
-- KEYS[8 + 3n + j] answers hash of the j-th campaign, from 0
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms · ARGV[5] outbox events max
-- ARGV[6] msgpack: {offers, campaign of each offer (from 1), campaigns, ids, offer of each (from 1), users, quantities, digests,
--         attributes as JSON text or ''}
-- Outcomes: 21 fenced · 22 busy (whole call) · then for each: 20 invalid · 23 conflict · 24 no_such_offer · 26 already_taken ·
--           27 not_open_yet · 28 on_hold · 29 over · 32 sold_out · 0 granted
-- Events: grab.granted · offer.closed (drained)
-- Returns msgpack: {0, history, rows} with a row {code, seq, at, amount, quantity, place, left, repeated} for each command,
--         or {code, retry_at, message} when the whole call was refused.
--- @include "shard"
--- @include "records"
--- @include "splitting"
--- @include "decide"
--- @include "repeats"
--- @include "offers"

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

local batch = cmsgpack.unpack(ARGV[6])
local names, campaign_of, campaigns = batch[1], batch[2], batch[3]
local ids, offer_of, users, quantities, digests, attributes = batch[4], batch[5], batch[6], batch[7], batch[8], batch[9]
local offers, campaign_ids, offer_users, campaign_key = {}, {}, {}, 7 + 3 * #names

-- Read all: each offer, the parts its users have, the answers of each campaign, then the refusals of what is not answered.
for c = 1, #campaigns do campaign_ids[c] = {} end
for o = 1, #names do
  offers[o] = load_offer(names[o], KEYS[5 + 3 * o])
  offer_users[o] = {}
end
for i = 1, #ids do
  local o = offer_of[i]
  local asked = campaign_ids[campaign_of[o]]
  asked[#asked + 1] = ids[i]
  asked = offer_users[o]
  asked[#asked + 1] = users[i]
end
local function lookup(key, fields)
  local found = {}
  if #fields == 0 then return found end
  local values = redis.call('HMGET', key, unpack(fields))
  for i = 1, #fields do found[fields[i]] = values[i] end
  return found
end
local answered, taken, refusals = {}, {}, {}
for c = 1, #campaigns do answered[c] = lookup(KEYS[campaign_key + c], campaign_ids[c]) end
for o = 1, #names do taken[o] = offers[o] and lookup(KEYS[6 + 3 * o], offer_users[o]) or {} end
if redis.call('EXISTS', KEYS[3]) == 1 then
  local fields = {}
  for i = 1, #ids do fields[i] = refusal_field(campaigns[campaign_of[offer_of[i]]], ids[i]) end
  refusals = lookup(KEYS[3], fields)
end

-- Parts drawn ahead are read once for all grabs of an offer in this call, from the first place that is free.
local function part_at(offer, o)
  if offer.draw == 'at_grab' then
    return next_part(offer.law, offer.amount_left, offer.units_left, offer.min, offer.max, offer.seed, offer.places + 1)
  end
  if not offer.parts_read then
    offer.parts_from = offer.places
    offer.parts_read = redis.call('GETRANGE', KEYS[7 + 3 * o], offer.places * 6, (offer.places + #offer_users[o]) * 6 - 1)
  end
  return (struct.unpack('>I6', offer.parts_read, (offer.places - offer.parts_from) * 6 + 1))
end

-- Everything of an event's text that is the same for all grants of an offer in this call, so that one format writes a line.
local function grant_form(offer)
  local form = '{"type":"grab.granted","v":1,"shard":' .. call.shard .. ',"seq":%d,"offer_seq":%d,"offer":"' .. offer.name
    .. '","at":' .. string.format('%.0f', call.now) .. ',"command":"%s","grab":"%s","user":"%s","quantity":1,"amount":%d,"asset":"'
    .. offer.asset .. '","place":%d,"left":%d%s,"digest":"%s"}'
  return form
end

local lines, now, pack, format = call.lines, call.now, struct.pack, string.format
local now_packed = now - EPOCH_MS

local function grant(i, o, offer)
  local id, user, digest = ids[i], users[i], digests[i]
  local amount = part_at(offer, o)
  local seq, offer_seq, place, left = call.seq + 1, offer.offer_seq + 1, offer.places + 1, offer.units_left - 1
  call.seq, offer.offer_seq, offer.places, offer.units_left = seq, offer_seq, place, left
  offer.amount_left = offer.amount_left - amount
  offer.form = offer.form or grant_form(offer)
  lines[#lines + 1] = format(offer.form, seq, offer_seq, id, id, user, amount, place, left,
    attributes[i] == '' and '' or ',"attributes":' .. attributes[i], digest)
  local record, part = pack(ANSWER, 0, seq, now_packed, place, amount, digest), pack(PART, place, amount, seq)
  if offer.tail ~= '' then record = record .. offer.tail end
  answered[campaign_of[o]][id], taken[o][user] = record, part
  local made, count = offer.answers, #offer.answers
  made[count + 1], made[count + 2] = id, record
  made = offer.users
  made[count + 1], made[count + 2] = user, part
  if left == 0 then close_offer(call, offer, 'drained', id) end
  return {0, seq, now, amount, 1, place, left}
end

-- The refusal of a grab as a row, in order of precedence; nil when it can be granted.
local function refusal_of(i, o, offer)
  if not offer then return {NO_SUCH_OFFER, 0, call.now} end
  local part = taken[o][users[i]]
  if part then
    local place, amount, seq = unpack_part(part)
    return {ALREADY_TAKEN, seq, call.now, amount, 1, place}
  end
  if call.now < offer.opens_at then return {NOT_OPEN_YET, 0, call.now, 0, 0, 0, 0, 0, offer.opens_at} end
  if offer.paused then return {ON_HOLD, 0, call.now} end
  if offer.closed and offer.reason == 'drained' then return {SOLD_OUT, 0, call.now} end
  if offer.closed or call.now >= offer.closes_at then return {OVER, 0, call.now} end
end

local rows = {}
for i = 1, #ids do
  local o = offer_of[i]
  local c, offer = campaign_of[o], offers[o]
  local record, refusal, row = answered[c][ids[i]]
  if not record and next(refusals) then refusal = refusals[refusal_field(campaigns[c], ids[i])] end
  if offer and quantities[i] ~= 1 then
    row = {INVALID, 0, now}
  elseif record or refusal then
    row = repeated_row(record, refusal, digests[i], now, offer and offer.parts)
    if row[1] == ALREADY_TAKEN and taken[o][users[i]] then
      row[6], row[4], row[2] = unpack_part(taken[o][users[i]])
      row[5] = 1
    end
  else
    row = refusal_of(i, o, offer)
    if row then
      local field = refusal_field(campaigns[c], ids[i])
      refusals[field] = refuse(call, row[1], field, names[o], digests[i])
    else
      row = grant(i, o, offer)
    end
  end
  rows[i] = row
end

-- Write all, the outbox first.
append_events(call)
for o = 1, #names do
  local offer = offers[o]
  if offer and #offer.answers > 0 then
    write_offer(call, offer, KEYS[6 + 3 * o], KEYS[7 + 3 * o], KEYS[campaign_key + campaign_of[o]])
  end
end
write_refusals(call)
return cmsgpack.pack({0, call.history, rows})
