-- Grants parts of an envelope: one part, or those of the plain grabs of a call, as most callers of a crowded
-- envelope send.
--- @include "cost"
--- @include "splitting"
--- @include "packed_values"
--- @include "decide"
--- @include "repeats"
--- @include "offers"

-- The amount of the next part. Parts drawn ahead are read once for all grabs of an offer in this call (at
-- most `most` of them), from the first place that is free.
local function part_at(offer, most)
  if offer.draw == 'at_grab' then
    return next_part(offer.law, offer.amount_left, offer.units_left, offer.min, offer.max, offer.source,
      offer.places + 1)
  end
  if not offer.parts_read then
    offer.parts_from = offer.places
    offer.parts_read = redis.call('GETRANGE', KEYS[offer.base + KEY.parts], offer.places * 6,
      (offer.places + most) * 6 - 1)
  end
  return (struct.unpack('>I6', offer.parts_read, (offer.places - offer.parts_from) * 6 + 1))
end

-- Grants the plain grabs of a call: of one envelope, with no user twice. Stops before the first grab that it
-- cannot grant. Returns the index of that grab and, for the reply, {first seq, first place, first left, time,
-- amounts as text}. Each grant costs `grab_cost`. `texts` has the ids and users of these grabs, as an event
-- has them: {ids, users, number of grabs}. It does what `take_part` in commands/grab.lua does, for all grabs
-- at once.
local grant_run
do
  -- How many grabs can be granted before the first whose user has a part, whose id is known, or for which no
  -- part is left.
  local function count_new(offer, ids, users)
    local has = redis.call('HMGET', KEYS[offer.base + KEY.users], unpack(users))
    local refused = stored_refusals(offer, ids, users)
    local most = math.min(#ids, offer.units_left)
    for i = 1, most do
      if has[i] or refused[i] then return i - 1 end
    end
    return most
  end

  -- The amounts of the next `grabs` parts.
  local function next_amounts(offer, grabs)
    local amounts, amount_left = {}, offer.amount_left
    if offer.draw == 'ahead' then
      local parts = redis.call('GETRANGE', KEYS[offer.base + KEY.parts], offer.places * 6,
        (offer.places + grabs) * 6 - 1)
      return unpack_list('>I6', '', parts, grabs)
    end
    for i = 1, grabs do
      amounts[i] = next_part(offer.law, amount_left, offer.units_left - i + 1, offer.min, offer.max,
        offer.source, offer.places + i)
      amount_left = amount_left - amounts[i]
    end
    return amounts
  end

  -- Notes what the users have then.
  local function keep_parts(call, offer, ids, users, amounts)
    local made, pack_next = offer.users, packer_of('parts', offer.places + 1, call.seq + 1, call.now)
    for i = 1, #amounts do
      made[2 * i - 1], made[2 * i] = users[i], pack_next(amounts[i], ids[i])
    end
  end

  function grant_run(call, offer, ids, users, grab_cost, texts)
    local grabs = count_new(offer, ids, users)
    spend(grab_cost * grabs)
    if grabs == 0 then return 1 end
    local amounts = next_amounts(offer, grabs)
    local seq, place, left = call.seq + grabs, offer.places + grabs, offer.units_left - grabs
    local text = numbers_text(amounts, grabs)
    local run = {call.seq + 1, offer.places + 1, offer.units_left - 1, call.now, text}
    keep_parts(call, offer, ids, users, amounts)
    end_whole_run(call, offer, 'grab.granted', ids, users, grabs, texts, text)
    for i = 1, grabs do offer.amount_left = offer.amount_left - amounts[i] end
    call.seq, offer.changed, offer.offer_seq = seq, true, offer.offer_seq + grabs
    offer.places, offer.units_left = place, left
    if left == 0 then close_offer(call, offer, 'drained', ids[grabs]) end
    return grabs + 1, run
  end
end
