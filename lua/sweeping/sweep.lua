#!lua flags=allow-oom
-- What time brings to offers: those who wait are served on, an offer whose time is over closes, one closed
-- long ago leaves Redis. What is remembered of that one counts as forgotten from this call on; `clean`
-- deletes it afterwards.
--
-- Command: none; the sweeper calls it with the offers it found due. An offer that is not due any more is left
--   alone.
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
-- Returns msgpack: {0, history, {number of offers seen to}}, or {code, retry_at, message}. Those it has no
-- room for come next time.
--- @include "cost"
--- @include "decide"
--- @include "offers"
--- @include "past"
--- @include "pieces"
--- @include "queue"

local RETIRE_AGAIN_MS = 60000

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

-- Who still waits when an offer has closed waits no more; a bounded number at once.
local function send_home(offer)
  for _ = 1, math.min(offer.queue_length, SERVED_AT_ONCE_MAX) do
    local name = waiter_at(offer, 1)
    leave_queue(call, offer, name, grab_of(offer, name), 'sweep')
  end
end

local names, campaign_of, campaign_names = unpack(cmsgpack.unpack(ARGV[6]))
local offers, campaigns = load_offers(names, campaign_of, campaign_names)
spend(COST.argument_byte * #ARGV[6])
local retired, seen_to = {}, 0
for o = 1, #names do
  if o > 1 and is_spent() then break end
  local offer = offers[o]
  local due = offer and tonumber(redis.call('ZSCORE', KEYS[6], names[o]) or math.huge)
  if offer and call.now >= due then
    seen_to, offer.changed = seen_to + 1, true
    if not offer.closed and call.now >= offer.closes_at then
      close_offer(call, offer, 'deadline', 'sweep')
    elseif not offer.closed then
      offer.due = offer.closes_at
      serve(call, offer, 'sweep')
    elseif offer.pieces and offer.queue_length > 0 then
      send_home(offer)
    elseif offer.held > 0 then
      offer.due = call.now + RETIRE_AGAIN_MS
    else
      add_line(call, event_head(call, offer, 'offer.retired', 'sweep') .. '}')
      retired[#retired + 1] = offer
      offers[o] = false
    end
  end
end

local reply = cmsgpack.pack({0, call.history, {seen_to}})
append_events(call)
write_all(call, offers, campaigns)
for _, offer in ipairs(retired) do remove_offer(offer, call.now) end
commit()
return reply
