-- The remains of an offer: how it leaves Redis, and which of its records are still valid afterwards.
--- @include "decide"
--- @include "offers"

-- For how long (ms) a retired offer's payments and its last offer_seq count; the same as in models/offers.py.
local PAYMENTS_KNOWN_MS = 180 * 86400000

-- The record of a retired offer: {name, offer_seq, at}, or nil. There is none for an offer that never
-- existed.
local function past_of(campaign, name)
  local past = campaign.past[name]
  if past == nil then
    local text = redis.call('HGET', campaign.state_key, 'retired/' .. name)
    local offer_seq, at = string.match(text or '', '^(%d+):(%d+)$')
    past = offer_seq and {name = name, offer_seq = tonumber(offer_seq), at = tonumber(at)} or false
    campaign.past[name] = past
  end
  return past or nil
end

-- The same while it counts, else nil: payments of a retired offer are known for PAYMENTS_KNOWN_MS.
local function known_past_of(campaign, name, now)
  local past = past_of(campaign, name)
  return past and now < past.at + PAYMENTS_KNOWN_MS and past or nil
end

-- Notes that records of a campaign are to be deleted; `what` is answers or payments. The field holds
-- `<history>:<cursor>:<1 if another pass must follow>`. A pass that has begun may have passed some of the
-- records, so it is followed by another one.
local function begin_cleaning(campaign, what)
  local field = campaign.name .. '/' .. what
  local history, cursor = string.match(redis.call('HGET', KEYS[12], field) or '', '^(%d+):(%d+):%d$')
  write('HSET', KEYS[12], field, cursor and cursor ~= '0' and history .. ':' .. cursor .. ':1' or '0:0:0')
end

-- Removes an offer from Redis. From now on, what its campaign remembers of it counts as forgotten, and
-- `clean` deletes it later. Its payments and its last offer_seq count for PAYMENTS_KNOWN_MS. With the
-- campaign's last offer, the campaign's answers, counters, zone and used tickets are removed too.
local function remove_offer(offer, now)
  write('SADD', KEYS[10], offer.name)
  write('SREM', KEYS[7], offer.name)
  write('ZREM', KEYS[6], offer.name)
  for key = 1, OFFER_KEYS do write('UNLINK', KEYS[offer.base + key]) end
  local campaign = offer.campaign
  write('ZADD', KEYS[11], string.format('%d', now), offer.name)
  write_past(campaign, {name = offer.name, offer_seq = offer.offer_seq, at = now})
  if count_offers(campaign, -1) == 0 then
    write('HDEL', KEYS[9], campaign.name)
    write('HDEL', KEYS[12], campaign.name .. '/answers')
    write('UNLINK', campaign.answers_key, campaign.counters.key, campaign.tickets_key)
    write('HDEL', campaign.state_key, 'zone', 'large')
    campaign.zone = nil
  else
    begin_cleaning(campaign, 'answers')
  end
end
