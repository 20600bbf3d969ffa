#!lua flags=allow-oom
-- Holds whose time is over, ended by themselves: units and limits go back, and to those who wait.
--
-- Command: none; the sweeper calls it with the holds it found due. A hold that is not due any more is left
--   alone.
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
-- Returns msgpack: {0, history, {number of holds looked at}}, or {code, retry_at, message}. Those it has no
-- room for come next time.
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
local looked_at = 0
for i = 1, #grabs do
  if i > 1 and is_spent() then break end
  local offer = offers[offer_of[i]]
  local grab = offer and grab_of(offer, grabs[i])
  if grab then lapse(call, offer, grabs[i], grab) end
  looked_at = i
end

return finish(call, offers, campaigns, {looked_at})
