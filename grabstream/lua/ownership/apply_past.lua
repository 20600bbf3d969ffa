#!lua flags=allow-oom
-- Writes the records of retired offers to a shard that is being recovered from a snapshot, which does not
-- have all events of those offers.
--
-- KEYS[1] shard hash · KEYS[2] past zset · then two for each campaign: payments hash, state hash
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch
-- ARGV[4] msgpack: {offers as {campaign (from 1), offer, last offer_seq, time it retired ms}, payments as
--         {campaign (from 1), payment, offer, grab, code, seq, at, quantity, paid, currency or '', basket or
--         ''}, in the order of their events}
-- Returns the number of offers and payments; or the error LOST when the shard has another owner.
--- @include "shard"
--- @include "packed_values"
--- @include "past"

local lost = lost_or_deciding()
if lost then return lost end

local offers, payments = unpack(cmsgpack.unpack(ARGV[4]))
redis.call('HSET', KEYS[1], 'partial', '1')
for _, past in ipairs(offers) do
  local c, name, offer_seq, at = unpack(past)
  redis.call('ZADD', KEYS[2], string.format('%d', at), name)
  redis.call('HSET', KEYS[2 + 2 * c], 'retired/' .. name, string.format('%d:%d', offer_seq, at))
end
for _, entry in ipairs(payments) do
  local c, payment, offer, grab, code, seq, at, quantity, paid, currency, basket = unpack(entry)
  local key, fields = KEYS[1 + 2 * c], {payment}
  if basket ~= '' then fields[2] = payment_field(payment, offer, grab) end
  if code == CODE.conflict then
    fields[1] = payment_field(payment, offer, grab, currency)
    local booked = redis.call('HGET', key, fields[1])
    paid = paid + (booked and cmsgpack.unpack(booked)[7] or 0)
  end
  local record = cmsgpack.pack({offer, grab, code, seq, at, quantity, paid, currency, basket ~= '' and basket
    or nil})
  for _, field in ipairs(fields) do redis.call('HSET', key, field, record) end
end
return #offers + #payments
