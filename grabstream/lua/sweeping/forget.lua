#!lua flags=allow-oom
-- Deletes the records of offers that retired so long ago that their payments no longer count; `clean` deletes
-- the payments.
--
-- Command: none; the sweeper calls it with offers of the past zset. An offer that is not due is left
--   unchanged.
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack: {offers, campaign of each (from 1), campaigns}
-- Outcomes: 21 fenced (whole call)
-- Events: none
-- Returns msgpack: {0, history, {number of offers forgotten}}, or {code, retry_at, message}.
--- @include "decide"
--- @include "offers"
--- @include "past"

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

-- As in models/offers.py: a day longer than payments are valid, so that no clock within the allowed skew can
-- need a deleted record.
local PAYMENTS_KEPT_MS = PAYMENTS_KNOWN_MS + 86400000

local names, campaign_of, campaign_names = unpack(cmsgpack.unpack(ARGV[6]))
local forgotten = 0
for o, name in ipairs(names) do
  local campaign = campaign_at(campaign_names[campaign_of[o]], #names, campaign_of[o])
  local at = tonumber(redis.call('ZSCORE', KEYS[11], name) or math.huge)
  if call.now >= at + PAYMENTS_KEPT_MS then
    forgotten = forgotten + 1
    write('ZREM', KEYS[11], name)
    write('HDEL', campaign.state_key, 'retired/' .. name)
    if redis.call('EXISTS', campaign.payments_key) == 1 then begin_cleaning(campaign, 'payments') end
  end
end
local reply = cmsgpack.pack({0, call.history, {forgotten}})
commit()
return reply
