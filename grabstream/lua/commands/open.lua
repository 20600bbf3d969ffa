#!lua
-- Opens offers, with their funding. The caller computes parts that are drawn ahead from the seed, and stages
-- them before the call if there are many.
--
-- Command: open
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua; then the strings
--   of staged parts
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] outbox events max
-- ARGV[6] msgpack: {offers, campaign of each offer (from 1), campaigns, ids, offer of each command (from 1),
--         digests, terms}; terms: kind, issuer, asset, total, units, opens_at, closes_at (0: not given),
--         life_ms, json, offsets_json, zone_json, rules (stored as they are), operator and approved_until
--         (ms) if given; for an envelope also funding, law, min, max, draw, seed, seed_sha256, sealed_seed,
--         beacon_at (ms, if it awaits a round of a beacon), and, if its parts are staged, staged: the number
--         of the string that has them (from 1)
-- ARGV[6 + i] parts of the i-th command, 6 bytes each, or '' when there are none; if they are staged, the
--   server epoch in which they were staged
-- Outcomes: 21 fenced · 22 busy (whole call) · 23 conflict (also: the id was used before) · 20 invalid ·
--   5 opened
-- Events: offer.opened
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "cost"
--- @include "shard"
--- @include "packed_values"
--- @include "decide"
--- @include "repeats"
--- @include "offers"

local STAGE_AGAIN_MS = 200

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

local function opened_line(offer, id, digest, terms, campaign_zone)
  return event_head(call, offer, 'offer.opened', id) .. ',"kind":"' .. terms.kind .. '","issuer":"'
    .. terms.issuer
    .. (terms.funding and '","funding":"' .. terms.funding or '') .. '","asset":"' .. terms.asset
    .. '","total":' .. int(terms.total)
    .. ',"opens_at":' .. int(offer.opens_at) .. ',"closes_at":' .. int(offer.closes_at) .. ',"terms":'
    .. terms.json
    .. (terms.offsets_json ~= '' and ',"offsets":' .. terms.offsets_json or '')
    .. (campaign_zone and ',"campaign_zone":' .. campaign_zone or '')
    .. (terms.seed and ',"seed_sha256":"' .. terms.seed_sha256 .. '","sealed_seed":"' .. terms.sealed_seed
    .. '"' or '')
    .. senders_text(terms) .. ',"digest":"' .. digest .. '"}'
end

-- The key of staged parts; false if they are incomplete: the server epoch has changed, or they were deleted.
local function staged_key(terms, epoch, first)
  local key = KEYS[first + terms.staged]
  return epoch == server_epoch() and redis.call('STRLEN', key) == 6 * terms.units and key
end

local arguments = cmsgpack.unpack(ARGV[6])
local names, campaign_of, campaign_names, ids, offer_of, digests, all_terms = unpack(arguments)
spend(COST.argument_byte * #ARGV[6])
local made, seen, rows, campaigns = {}, {}, {}, {}
local staged_from = SHARD_KEYS + OFFER_KEYS * #names + CAMPAIGN_KEYS * #campaign_names
for c = 1, #campaign_names do campaigns[c] = campaign_at(campaign_names[c], #names, c) end
for i = 1, #ids do
  if i > 1 and is_spent() then break end
  spend(COST.offer + COST.part_byte * #ARGV[6 + i])
  local o, id, digest, terms = offer_of[i], ids[i], digests[i], all_terms[i]
  local name, campaign = names[o], campaigns[campaign_of[o]]
  local state_key = key_of(o, 'state')
  local record_field = campaign.answers_key .. id
  local record = seen[record_field] or answer_that_counts(call, campaign,
    redis.call('HGET', campaign.answers_key, id))
  local field = refusal_field(campaign.name, id)
  local refusal = refusal_that_counts(call, campaign, field, redis.call('HGET', KEYS[3], field))
  local row = repeated_row(record, refusal, {digest = digest, offer = name}, call.now, campaign.name)
  row = row or unapproved_row(call, terms)
  if not row and (seen[name] or redis.call('EXISTS', state_key) == 1 or has_retired(call, name)) then
    row = {code = CODE.conflict, at = call.now}
  end
  if not row then
    local opens_at = terms.opens_at == 0 and call.now or terms.opens_at
    local closes_at = terms.closes_at == 0 and opens_at + terms.life_ms or terms.closes_at
    if closes_at <= opens_at then
      row = {code = CODE.invalid, at = call.now,
        details = {message = 'terms.closes_at: must be after opens_at and after now'}}
    elseif terms.beacon_at and terms.beacon_at <= call.now then
      row = {code = CODE.invalid, at = call.now,
        details = {message = 'terms.beacon: the round is already due; name a later one'}}
    else
      local staged = terms.staged and staged_key(terms, ARGV[6 + i], staged_from)
      if staged == false then
        return cmsgpack.pack({CODE.busy, call.now + STAGE_AGAIN_MS,
          'the staged parts are gone: send the command again'})
      end
      local offer = {name = name, offer_seq = 0, opens_at = opens_at, closes_at = closes_at}
      add_line(call, opened_line(offer, id, digest, terms, join_zone(campaign, terms)))
      row = {code = CODE.opened, seq = call.seq, at = call.now, amount = terms.total, left = terms.units}
      record = pack_row(name, row, digest)
      seen[record_field], seen[name] = record, true
      made[#made + 1] = {o, campaign, id, record, terms, offer, staged and '' or ARGV[6 + i], staged}
    end
  end
  rows[i] = list_row(row)
end

local reply = cmsgpack.pack({0, call.history, rows})
append_events(call)
for _, entry in ipairs(made) do
  local o, campaign, id, record, terms, offer, parts, staged = unpack(entry)
  create_offer(offer.name, o, campaign, terms, offer.opens_at, offer.closes_at, parts)
  if staged then
    write('PERSIST', staged)
    write('RENAME', staged, key_of(o, 'parts'))
  end
  write('HSET', campaign.answers_key, id, record)
end
commit()
return reply
