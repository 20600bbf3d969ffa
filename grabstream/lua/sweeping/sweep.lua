#!lua flags=allow-oom
-- Handles offers that are due: serves the queue of an open offer, where a call has left grabs to it or the
-- hours begin; closes an expired offer; removes users still queued at a closed offer; retires an offer that
-- closed long ago. Records of a retired offer count as forgotten from this call on; `clean` deletes it later.
--
-- Command: none; the sweeper calls it with offers that are due. An offer that is no longer due is left
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
-- Events: offer.closed (deadline) · offer.retired · grab.held (waited) · grab.released (left_queue)
-- Returns msgpack: {0, history, {number of offers handled}}, or {code, retry_at, message}. The sweeper sends
-- the other offers again.
--- @include "cost"
--- @include "decide"
--- @include "offers"
--- @include "past"
--- @include "pieces"
--- @include "queue"

local RETIRE_AGAIN_MS = 60000

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

-- Removes grabs that are still queued at a closed offer, at most SERVED_AT_ONCE_MAX per call.
local function empty_queue(offer)
  for _ = 1, math.min(offer.queue_length, SERVED_AT_ONCE_MAX) do
    local name = waiter_at(offer, 1)
    leave_queue(call, offer, name, grab_of(offer, name), 'sweep')
  end
end

local names, campaign_of, campaign_names = unpack(cmsgpack.unpack(ARGV[6]))
local offers, campaigns = load_offers(names, campaign_of, campaign_names)
spend(COST.argument_byte * #ARGV[6])
local retired, handled = {}, 0
for o = 1, #names do
  if o > 1 and is_spent() then break end
  local offer = offers[o]
  local due = offer and tonumber(redis.call('ZSCORE', KEYS[6], names[o]) or math.huge)
  if offer and call.now >= due then
    handled, offer.changed = handled + 1, true
    if not offer.closed and call.now >= offer.closes_at then
      close_offer(call, offer, 'deadline', 'sweep')
    elseif not offer.closed then
      offer.due = offer.closes_at
      serve(call, offer, 'sweep')
    elseif offer.pieces and offer.queue_length > 0 then
      empty_queue(offer)
    elseif offer.held > 0 then
      offer.due = call.now + RETIRE_AGAIN_MS
    else
      add_line(call, event_head(call, offer, 'offer.retired', 'sweep') .. '}')
      retired[#retired + 1] = offer
      offers[o] = false
    end
  end
end

local reply = cmsgpack.pack({0, call.history, {handled}})
append_events(call)
write_all(call, offers, campaigns)
for _, offer in ipairs(retired) do remove_offer(offer, call.now) end
commit()
return reply
