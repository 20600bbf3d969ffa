#!lua flags=allow-oom
-- Offers whose time is over, closed by themselves: what is left goes back, the seed is revealed.
--
-- Command: none; the sweeper calls it with the offers it found due. An offer that is closed or not due any more is left alone.
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list · KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set
-- KEYS[8 + 3i] offer hash · KEYS[9 + 3i] users hash · KEYS[10 + 3i] parts string, of the i-th offer, from 0
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms · ARGV[5] ''
-- ARGV[6] msgpack: list of offers
-- Outcomes: 21 fenced (whole call)
-- Events: offer.closed (deadline)
-- Returns msgpack: {0, history, {number of offers closed}}, or {code, retry_at, message}.
--- @include "shard"
--- @include "records"
--- @include "decide"
--- @include "offers"

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

local closed = {}
for i, name in ipairs(cmsgpack.unpack(ARGV[6])) do
  local offer = load_offer(name, KEYS[5 + 3 * i])
  if offer and not offer.closed and call.now >= offer.closes_at then
    close_offer(call, offer, 'deadline', 'sweep')
    closed[#closed + 1] = {offer, i}
  end
end

append_events(call)
for _, entry in ipairs(closed) do
  write_offer(call, entry[1], KEYS[6 + 3 * entry[2]], KEYS[7 + 3 * entry[2]])
end
return cmsgpack.pack({0, call.history, {#closed}})
