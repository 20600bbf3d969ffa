#!lua flags=allow-oom
-- Ends expired holds: their units return to the offer and the limits, and then serve the queue.
--
-- Command: none; the sweeper calls it with holds that are due. A hold that is no longer due is left
--   unchanged.
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack: {offers, campaign of each (from 1), campaigns, grabs, offer of each grab (from 1)}
-- Outcomes: 21 fenced (whole call)
-- Events: grab.released (expired) · grab.held (waited)
-- Returns msgpack: {0, history, {number of holds handled}}, or {code, retry_at, message}. The sweeper sends
-- the other holds again.
--- @include "cost"
--- @include "decide"
--- @include "offers"
--- @include "pieces"
--- @include "settling"

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

local names, campaign_of, campaign_names, grabs, offer_of = unpack(cmsgpack.unpack(ARGV[6]))
local offers, campaigns = load_offers(names, campaign_of, campaign_names)
spend(COST.argument_byte * #ARGV[6])
local handled = 0
for i = 1, #grabs do
  if i > 1 and is_spent() then break end
  local offer = offers[offer_of[i]]
  local grab = offer and grab_of(offer, grabs[i])
  if grab then lapse(call, offer, grabs[i], grab) end
  handled = i
end

return finish(call, offers, campaigns, {handled})
