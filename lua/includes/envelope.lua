-- Grants parts of an envelope: one part, or a run of plain grabs, which is what most callers of a crowded
-- envelope send.
--- @include "cost"
--- @include "splitting"
--- @include "records"
--- @include "calendar"
--- @include "decide"
--- @include "repeats"
--- @include "offers"

-- The amount of the next part. Parts drawn ahead are read once for all grabs of an offer in this call (at
-- most `most` of them), from the first place that is free.
local function part_at(offer, most)
  if offer.draw == 'at_grab' then
    return next_part(offer.law, offer.amount_left, offer.units_left, offer.min, offer.max, offer.seed,
      offer.places + 1)
  end
  if not offer.parts_read then
    offer.parts_from = offer.places
    offer.parts_read = redis.call('GETRANGE', KEYS[offer.base + PARTS], offer.places * 6,
      (offer.places + most) * 6 - 1)
  end
  return (struct.unpack('>I6', offer.parts_read, (offer.places - offer.parts_from) * 6 + 1))
end

-- Whether a grab of this offer can only be refused because its user already has a part, its id is known, or
-- no part is left.
local function is_plain(call, offer)
  if not offer or offer.pieces or offer.closed or offer.paused or offer.rules.audience
    or next(offer.loads) then
    return false
  end
  if call.now < offer.opens_at or call.now >= offer.closes_at then return false end
  return not (offer.rules.hours and opens_next(offer.rules.hours, offer.rules.offsets, call.now))
end

-- Grants a run of plain grabs: of one envelope, with no id or user twice. Stops before the first grab that it
-- cannot grant. Returns the index of that grab and, for the reply, {first seq, first place, first left, time,
-- amounts}. Each grant costs `grab_cost`.
-- It does what `take_part` in commands/grab.lua does, for all grabs at once. It joins the text of each
-- counting number from its hundreds and its last two digits, since formatting a number costs more than
-- deciding a grab.
local grant_run
do
  -- The last two digits of a number as text.
  local TWO = {[0] = '00', '01', '02', '03', '04', '05', '06', '07', '08', '09', '10', '11', '12', '13',
    '14', '15', '16', '17', '18', '19', '20', '21', '22', '23', '24', '25', '26', '27', '28', '29', '30',
    '31', '32', '33', '34', '35', '36', '37', '38', '39', '40', '41', '42', '43', '44', '45', '46', '47',
    '48', '49', '50', '51', '52', '53', '54', '55', '56', '57', '58', '59', '60', '61', '62', '63', '64',
    '65', '66', '67', '68', '69', '70', '71', '72', '73', '74', '75', '76', '77', '78', '79', '80', '81',
    '82', '83', '84', '85', '86', '87', '88', '89', '90', '91', '92', '93', '94', '95', '96', '97', '98',
    '99'}

  -- A number without its last two digits, as text; '' for a number below 100.
  local function high(number)
    return number < 100 and '' or string.format('%.0f', (number - number % 100) / 100)
  end

  function grant_run(call, offer, ids, users, campaign, grab_cost)
    -- Whether an id is known. From layout 4 on, what the user has tells it.
    local kept = {}
    if not call.has_own_ids then
      if redis.call('HGET', campaign.state_key, 'large') then
        -- The campaign has large answers, so this only tests whether there is one under each id.
        for i = 1, #ids do kept[i] = redis.call('HSTRLEN', campaign.answers_key, ids[i]) > 0 end
      else
        kept = redis.call('HMGET', campaign.answers_key, unpack(ids))
      end
    end
    local has = redis.call('HMGET', KEYS[offer.base + USERS], unpack(users))
    local refused = false
    if redis.call('EXISTS', KEYS[3]) == 1 then
      local fields = {}
      for i = 1, #ids do
        fields[i] = refusal_field_of_grab(call, offer.name, campaign.name, users[i], ids[i])
      end
      refused = redis.call('HMGET', KEYS[3], unpack(fields))
    end
    local lines, now, pack, unpack_part_at = not call.has_runs and call.lines, call.now, struct.pack,
      struct.unpack
    local now_packed, tail, made_users = now - EPOCH_MS, offer.tail, offer.users
    local made = not call.has_own_ids and campaign.made
    local seq, offer_seq, place = call.seq, offer.offer_seq, offer.places
    local left, amount_left = offer.units_left, offer.amount_left
    local from, ahead, parts = place, offer.draw == 'ahead', nil
    if ahead then
      parts = redis.call('GETRANGE', KEYS[offer.base + PARTS], place * 6, (place + #ids) * 6 - 1)
    end
    local head = '{"type":"grab.granted","v":1,"shard":' .. call.shard .. ',"seq":'
    local named = ',"offer":"' .. offer.name .. '","at":' .. string.format('%.0f', now) .. ',"command":"'
    local of_asset = ',"asset":"' .. offer.asset .. '","place":'
    local seq_high, offer_seq_high, place_high, left_high
    local granted, run = #ids, {seq + 1, place + 1, left - 1, now, {}}
    local amounts = run[5]
    for i = 1, #ids do
      if left == 0 or kept[i] or has[i] or (refused and refused[i]) then
        granted = i - 1
        break
      end
      local id, user = ids[i], users[i]
      local amount
      if ahead then
        amount = unpack_part_at('>I6', parts, (place - from) * 6 + 1)
      else
        amount = next_part(offer.law, amount_left, left, offer.min, offer.max, offer.seed, place + 1)
      end
      seq, offer_seq, place, left, amount_left = seq + 1, offer_seq + 1, place + 1, left - 1,
        amount_left - amount
      if lines then
        local seq_low, offer_seq_low = seq % 100, offer_seq % 100
        local place_low, left_low = place % 100, left % 100
        if seq_low == 0 or not seq_high then seq_high = high(seq) end
        if offer_seq_low == 0 or not offer_seq_high then offer_seq_high = high(offer_seq) end
        if place_low == 0 or not place_high then place_high = high(place) end
        if left_low == 99 or not left_high then left_high = high(left) end
        lines[#lines + 1] = head .. seq_high .. (seq < 100 and seq_low or TWO[seq_low]) .. ',"offer_seq":'
          .. offer_seq_high
          .. (offer_seq < 100 and offer_seq_low or TWO[offer_seq_low]) .. named .. id .. '","grab":"' .. id
          .. '","user":"' .. user
          .. '","quantity":1,"amount":' .. amount .. of_asset .. place_high
          .. (place < 100 and place_low or TWO[place_low]) .. ',"left":'
          .. left_high .. (left < 100 and left_low or TWO[left_low]) .. ',"digest":"plain"}'
      end
      made_users[2 * i - 1] = user
      if made then
        local record = pack(ANSWER, 0, seq, now_packed, place, amount, 0)
        made[2 * i - 1], made[2 * i] = id, tail == '' and record or record .. tail
        made_users[2 * i] = pack(PART, place, amount, seq)
      else
        made_users[2 * i] = pack(PART_WITH_ID, place, amount, seq, now_packed, #id, id)
      end
      amounts[i] = amount
    end
    spend(grab_cost * granted)
    if granted > 0 then
      if not lines then
        call.run = {type = 'grab.granted', offer = offer, seq = call.seq + 1, offer_seq = offer.offer_seq + 1,
          place = offer.places + 1, left = left, count = granted, ids = ids, users = users,
          amounts = amounts, rare = {}}
        end_run(call)
      end
      call.seq, offer.changed = seq, true
      offer.offer_seq, offer.places, offer.units_left, offer.amount_left = offer_seq, place, left, amount_left
      if left == 0 then close_offer(call, offer, 'drained', ids[granted]) end
    end
    return granted + 1, run
  end
end
