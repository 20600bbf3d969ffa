#!lua flags=allow-oom
-- What is kept of offers that have retired, in a shard that is being recovered from a snapshot, which has not
-- all of their events.
--
-- KEYS[1] shard hash · KEYS[2] past zset · then two for each campaign: payments hash, state hash
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch
-- ARGV[4] msgpack: {offers as {campaign (from 1), offer, last offer_seq, time it retired ms}, payments as
--         {campaign (from 1), payment, offer, grab, code, seq, at, quantity, paid, currency or ''}, in the
--         order of their events}
-- Returns the number of both; or the error LOST when another took the shard over.
--- @include "shard"

if not is_owner(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then
  return redis.error_reply('LOST the shard has another owner, term or life')
end
if redis.call('HGET', KEYS[1], 'life') then return redis.error_reply('LOST the shard is not fenced') end

local offers, payments = unpack(cmsgpack.unpack(ARGV[4]))
redis.call('HSET', KEYS[1], 'partial', '1')
for _, one in ipairs(offers) do
  local c, name, offer_seq, at = unpack(one)
  redis.call('ZADD', KEYS[2], string.format('%.0f', at), name)
  redis.call('HSET', KEYS[2 + 2 * c], 'retired/' .. name, string.format('%.0f:%.0f', offer_seq, at))
end
for _, one in ipairs(payments) do
  local c, payment, offer, grab, code, seq, at, quantity, paid, currency = unpack(one)
  redis.call('HSET', KEYS[1 + 2 * c], payment, cmsgpack.pack({offer, grab, code, seq, at, quantity, paid,
    currency}))
end
return #offers + #payments
