#!lua
-- Grabs of one shard, decided in order, with their events, in one call.
--
-- Command: grab
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list · KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set
-- KEYS[8 + 3i] offer hash · KEYS[9 + 3i] users hash · KEYS[10 + 3i] parts string, for the i-th offer of the batch, from 0
-- KEYS[8 + 3n + j] answers hash of the j-th campaign, from 0
-- ARGV[1] shard number · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms · ARGV[5] outbox events max
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
local answered, taken, refusal_fields = {}, {}, {}
for c = 1, #campaigns do answered[c] = lookup(KEYS[campaign_key + c], campaign_ids[c]) end
for o = 1, #names do taken[o] = offers[o] and lookup(KEYS[6 + 3 * o], offer_users[o]) or {} end
for i = 1, #ids do
  local c = campaign_of[offer_of[i]]
  if not answered[c][ids[i]] then refusal_fields[#refusal_fields + 1] = refusal_field(campaigns[c], ids[i]) end
end
local refusals = lookup(KEYS[3], refusal_fields)

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

local function grant(i, o, offer)
  local id, user, digest = ids[i], users[i], digests[i]
  local amount = part_at(offer, o)
  offer.places = offer.places + 1
  offer.units_left = offer.units_left - 1
  offer.amount_left = offer.amount_left - amount
  offer.touched = true
  call.lines[#call.lines + 1] = event_head(call, offer, 'grab.granted', id) .. ',"grab":"' .. id .. '","user":"' .. user
    .. '","quantity":1,"amount":' .. amount .. ',"asset":"' .. offer.asset .. '","place":' .. offer.places
    .. ',"left":' .. offer.units_left .. (attributes[i] ~= '' and ',"attributes":' .. attributes[i] or '')
    .. ',"digest":"' .. digest .. '"}'
  local seq, place = call.seq, offer.places
  local record, part = pack_answer(0, seq, call.now, place, amount, digest, offer.tail), pack_part(place, amount, seq)
  answered[campaign_of[o]][id] = record
  taken[o][user] = part
  local made = offer.answers
  made[#made + 1] = id
  made[#made + 1] = record
  made = offer.users
  made[#made + 1] = user
  made[#made + 1] = part
  local row = {0, seq, call.now, amount, 1, place, offer.units_left}
  if offer.units_left == 0 then close_offer(call, offer, 'drained', id) end
  return row
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
  local field = refusal_field(campaigns[c], ids[i])
  local row
  if offer and quantities[i] ~= 1 then
    row = {INVALID, 0, call.now}
  else
    row = repeated_row(answered[c][ids[i]], refusals[field], digests[i], call.now, offer and offer.parts)
    if row and row[1] == ALREADY_TAKEN and taken[o][users[i]] then
      row[6], row[4], row[2] = unpack_part(taken[o][users[i]])
      row[5] = 1
    end
  end
  if not row then
    if offer and not offer.tail then offer.tail = offer_tail(offer.name) end
    row = refusal_of(i, o, offer)
    if row then
      refuse(call, row[1], field, names[o], digests[i])
      refusals[field] = pack_refusal(row[1], call.now, digests[i])
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
  if offer and offer.touched then
    write_offer(call, offer, KEYS[6 + 3 * o], KEYS[7 + 3 * o], KEYS[campaign_key + campaign_of[o]])
  end
end
write_refusals(call)
return cmsgpack.pack({0, call.history, rows})
