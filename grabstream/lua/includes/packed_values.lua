-- Compact binary records of answers, refusals, parts, grabs and orders: the only file of the scripts that
-- packs and unpacks them.
--- @include "cost"
--- @include "shard"

-- Times are stored as 5 bytes of milliseconds since 2020-01-01 (enough until 2054).
local EPOCH_MS = 1577836800000

-- A digest begins with the name of its form and a '$', which no id contains. models/digests.py makes and
-- compares digests. A grab that asks for one unit and nothing else has this digest: its event, and the record
-- of its user, hold its whole body.
local PLAIN = 'plain'

-- The part of a record that names its offer: '' if the offer has its campaign's name, since no other offer
-- has that name.
local function offer_tail(name)
  return string.find(name, ':', 1, true) and name or ''
end

-- A row is the answer to a command, by name; what is 0, false or nil may be absent. It is sent and stored as
-- the list that list_row makes, whose last places are omitted if they are empty. `details` has what only some
-- answers have; `first` in it is a row too, of which list_row makes a list in its place: so a row with it is
-- listed once.
local list_row, row_of_list
do
  function list_row(row)
    local seq, repeated, retry_at, details = row.seq, row.repeated, row.retry_at, row.details
    if not (seq or repeated or retry_at or details) then return {row.code, 0, row.at} end
    local list = {row.code, seq or 0, row.at, row.amount or 0, row.quantity or 0, row.place or 0,
      row.left or 0}
    if repeated or retry_at or details then
      if details and details.first then details.first = list_row(details.first) end
      list[8], list[9], list[10] = repeated and 1 or 0, retry_at or 0, details
    end
    return list
  end

  function row_of_list(list)
    return {code = list[1], seq = list[2], at = list[3], amount = list[4], quantity = list[5],
      place = list[6], left = list[7], repeated = list[8] == 1, retry_at = list[9], details = list[10]}
  end
end

-- Answer with an event: code 1, seq 6, at 5, place 4, amount 6, length of the digest 1 byte; the digest,
-- empty for PLAIN; then the offer's name (see offer_tail). An answer that does not fit has in place of the
-- name MessagePack {offer, row, the whole body if repeats are compared with it}, whose first byte no name can
-- have. For a command about the offer itself, `place` holds the units left after it.
local pack_answer, pack_row, unpack_answer
do
  local ANSWER = '>I1I6I5I4I6I1'

  function pack_answer(code, seq, at, place, amount, digest, tail)
    if digest == PLAIN then digest = '' end
    return struct.pack(ANSWER, code, seq, at - EPOCH_MS, place, amount, #digest) .. digest .. tail
  end

  -- Packs an answer whose whole row is kept.
  function pack_row(name, row, digest, full)
    local tail = cmsgpack.pack({name, list_row(row), full})
    local record = pack_answer(row.code, row.seq, row.at, 0, 0, digest, tail)
    spend(COST.answer_byte * #record)
    return record
  end

  -- Returns code, seq, time, place, amount, digest and tail.
  function unpack_answer(record)
    local code, seq, at, place, amount, length = struct.unpack(ANSWER, record)
    local digest = length == 0 and PLAIN or string.sub(record, 24, 23 + length)
    return code, seq, at + EPOCH_MS, place, amount, digest, string.sub(record, 24 + length)
  end
end

-- From the tail of an answer whose whole row is kept, returns the offer's name, the row and the whole body;
-- nil for another answer.
local function unpack_row(tail)
  local first = string.byte(tail, 1)
  if not first or first < 128 then return nil end
  local kept = cmsgpack.unpack(tail)
  return kept[1], row_of_list(kept[2]), kept[3]
end

-- The offer that an answer is about. In an answer whose whole row is kept the name comes first; the rest is
-- unpacked only if the name is long.
local function offer_of_answer(record, campaign)
  local tail = select(7, unpack_answer(record))
  local first, second = string.byte(tail, 1, 2)
  if not first then return campaign end
  if first < 128 then return tail end
  if second < 0xa0 or second > 0xbf then return (unpack_row(tail)) end
  return string.sub(tail, 3, 2 + second - 0xa0)
end

-- The field of the answer to a grab of pieces: its id belongs to its offer.
local function answer_field_of_grab(offer, id)
  return offer .. '/' .. id
end

-- A field of the payments of a campaign, in addition to that of the payment itself: for one grab of a basket
-- that it pays; with a currency, for money of a recorded payment that came for a grab beyond what is
-- recorded. No payment has a newline.
local function payment_field(payment, offer, grab, currency)
  return payment .. '\n' .. offer .. '/' .. grab .. (currency and '\n' .. currency or '')
end

-- Refusal: code 1, at 5, length of the digest 1 byte; the digest; then the offer's name (see offer_tail). The
-- answer to a command whose effect already held has no event and is stored among the refusals: it has its
-- code + AGAIN, and before the name seq 6 and quantity 6 bytes of the event that had the effect.
local pack_refusal, pack_again, unpack_refusal, offer_of_refusal
do
  local REFUSAL, AGAIN = '>I1I5I1', 128

  function pack_refusal(code, at, digest, name)
    return struct.pack(REFUSAL, code, at - EPOCH_MS, #digest) .. digest .. offer_tail(name)
  end

  function pack_again(code, seq, at, quantity, digest, name)
    return struct.pack(REFUSAL, code + AGAIN, at - EPOCH_MS, #digest) .. digest
      .. struct.pack('>I6I6', seq, quantity) .. offer_tail(name)
  end

  function unpack_refusal(record)
    local code, at, length = struct.unpack(REFUSAL, record)
    local digest = string.sub(record, 8, 7 + length)
    if code < AGAIN then return code, at + EPOCH_MS, digest end
    return code - AGAIN, at + EPOCH_MS, digest, struct.unpack('>I6I6', record, 8 + length)
  end

  function offer_of_refusal(record, campaign)
    local code, _, length = struct.unpack(REFUSAL, record)
    local tail = string.sub(record, 8 + length + (code < AGAIN and 0 or 12))
    return tail == '' and campaign or tail
  end
end

-- A user's part of an envelope, which is also the answer to the grab: place 3, amount 6, seq 5, at 5, length
-- of the id 1 byte; the id of the grab; then its digest, empty for PLAIN.
local pack_part, unpack_part, answer_of_part
do
  local PART = '>I3I6I5I5I1c0'

  function pack_part(place, amount, seq, at, id, digest)
    return struct.pack(PART, place, amount, seq, at - EPOCH_MS, #id, id) .. (digest == PLAIN and '' or digest)
  end

  function unpack_part(record)
    local place, amount, seq = struct.unpack('>I3I6I5', record)
    return place, amount, seq
  end

  -- The answer to the grab that got a part, if it has this id; else nil. `tail` is that of the offer.
  function answer_of_part(record, id, tail)
    local place, amount, seq, at, its_id, digest_from = struct.unpack(PART, record)
    if its_id ~= id then return nil end
    return pack_answer(0, seq, at + EPOCH_MS, place, amount, string.sub(record, digest_from), tail)
  end
end

-- Functions that return texts one after the other, for the records of plain grabs: the first with this place
-- and seq, each next one with the next. They join bytes in place of packing numbers, which costs four times
-- as much. `packer_of` gets what they pack:
--   parts: gets an amount and an id, and returns what `pack_part` does.
--   rows: gets a packed row, and returns what `pack_row` does for a plain grab.
--   refusals: gets a user, and returns what `pack_refusal` does for a plain grab of an offer.
--   numbers: returns what `cmsgpack.pack` does of a number, and adds `step` to it.
--   answers: gets a seq, a digest and a packed row, and returns what `pack_row` does; for any command of an
--     offer, and any seq.
local packer_of
do
  -- Bytes, and small amounts in 6 bytes. Filled as they are needed: a library that is being loaded has no
  -- `string`.
  local BYTES, AMOUNTS, AMOUNTS_MAX = {}, {}, 10000

  local makers = {}

  function packer_of(what, ...)
    if not BYTES[255] then
      for byte = 0, 255 do BYTES[byte] = string.char(byte) end
    end
    return makers[what](...)
  end

  function makers.parts(place, seq, at)
    local pack = struct.pack
    local at_packed = pack('>I5', at - EPOCH_MS)
    local place_low, seq_low = place % 256, seq % 256
    local place_high, seq_high = pack('>I2', (place - place_low) / 256), pack('>I4', (seq - seq_low) / 256)
    return function(amount, id)
      local amount_packed = AMOUNTS[amount]
      if not amount_packed then
        amount_packed = pack('>I6', amount)
        if amount < AMOUNTS_MAX then AMOUNTS[amount] = amount_packed end
      end
      local record = place_high .. BYTES[place_low] .. amount_packed .. seq_high .. BYTES[seq_low]
        .. at_packed .. BYTES[#id] .. id
      place, seq, place_low, seq_low = place + 1, seq + 1, place_low + 1, seq_low + 1
      if place_low == 256 then place_low, place_high = 0, pack('>I2', place / 256) end
      if seq_low == 256 then seq_low, seq_high = 0, pack('>I4', seq / 256) end
      return record
    end
  end

  function makers.rows(name, code, seq, at)
    local low, pack, empty = seq % 256, struct.pack, pack_answer(code, 0, at, 0, 0, PLAIN, '')
    local high, first = pack('>I5', (seq - low) / 256), string.sub(empty, 1, 1)
    local rest = string.sub(empty, 8) .. string.char(146) .. cmsgpack.pack(name)
    return function(row)
      local record = first .. high .. BYTES[low] .. rest .. row
      seq, low = seq + 1, low + 1
      if low == 256 then low, high = 0, pack('>I5', seq / 256) end
      return record
    end
  end

  function makers.answers(name, code, at)
    local empty = pack_answer(code, 0, at, 0, 0, PLAIN, '')
    local first, middle = string.sub(empty, 1, 1), string.sub(empty, 8, -2)
    local tail, high, high_packed = string.char(146) .. cmsgpack.pack(name), -1, nil
    return function(seq, digest, row)
      local low = seq % 256
      if seq - low ~= high then high, high_packed = seq - low, struct.pack('>I5', (seq - low) / 256) end
      return first .. high_packed .. BYTES[low] .. middle .. BYTES[#digest] .. digest .. tail .. row
    end
  end

  function makers.refusals(name, code, at)
    local start, tail, heads = PLAIN .. '$' .. name .. '/', offer_tail(name), {}
    return function(user)
      local head = heads[#user]
      if not head then
        head = string.sub(pack_refusal(code, at, start .. user, name), 1, -#user - #tail - 1)
        heads[#user] = head
      end
      return head .. user .. tail
    end
  end

  function makers.numbers(number, step)
    local high, high_packed = -1, nil
    return function()
      local this, low = number, number % 256
      number = number + step
      -- Only from 256 on, numbers that differ in the last byte only have the same bytes before it.
      if this < 256 then return cmsgpack.pack(this) end
      if this - low ~= high then high, high_packed = this - low, string.sub(cmsgpack.pack(this), 1, -2) end
      return high_packed .. BYTES[low]
    end
  end
end

-- A list of the values that stand in a text, each in a format of `struct.unpack`, with what `between` skips
-- between them.
local unpack_list
do
  -- The last format of a list of each is kept: most calls of a crowd are alike. Formats are short, so there
  -- are few.
  local COUNTS, FORMATS = {}, {}

  function unpack_list(format, between, text, count)
    if COUNTS[format] ~= count then
      COUNTS[format], FORMATS[format] = count, string.rep(format .. between, count - 1) .. format
    end
    local values = {struct.unpack(FORMATS[format], text)}
    values[count + 1] = nil
    return values
  end
end

-- The head of a text of this many bytes in MessagePack; kept by length, since it is made from such a text.
local packed_head
do
  local HEADS = {}

  function packed_head(length)
    local head = HEADS[length]
    if not head then
      head = string.sub(cmsgpack.pack(string.rep('x', length)), 1, -length - 1)
      HEADS[length] = head
    end
    return head
  end
end

-- The values in an argument that has '","' between them, as in an event. `width` is the length of all or, if
-- they differ, the format of the text.
local function values_of(text, width, count)
  if type(width) == 'number' then return unpack_list('c' .. width, 'xxx', text, count) end
  local values = {struct.unpack(width, text)}
  values[count + 1] = nil
  return values
end

local ACTIVE, RELEASED, EXPIRED, WAITING = 0, 1, 2, 3

local function new_grab(user, quantity, under)
  return {user = user, place = 0, quantity = quantity, held = 0, taken = 0, redeemed = 0, lapsed = 0,
    deadline = 0, grace = 0,
    extensions = 0, price = 0, status = ACTIVE, ended_seq = 0, ended_at = 0, confirmed_seq = 0,
    confirmed_at = 0, under = under,
    counted = {{quantity, under}},
    payments = {}, codes = {}}
end

-- A grab of pieces as a list of its fields; models/rules/state.py describes each. The last two are there only
-- where a grab has them: what its events carry, while it is queued (false for none, if a basket follows); its
-- basket. Names of counters that end with the grab's user are stored without the user. An entry of `counted`
-- has 0 in place of its counters if they are those of `under`.
local pack_grab, unpack_grab
do
  local SLASH = 47

  local function short_name(name, user)
    local last = #name - #user
    if string.byte(name, last) ~= SLASH or string.sub(name, last + 1) ~= user then return name end
    return string.sub(name, 1, last)
  end

  local function without_user(counters, user)
    local short = {}
    for i, counter in ipairs(counters) do
      short[i] = {short_name(counter[1], user), counter[2], counter[3]}
    end
    return short
  end

  -- Adds the user to the names of its counters.
  local function add_user(counters, user)
    for i = 1, #counters do
      local name = counters[i][1]
      if string.byte(name, -1) == SLASH then counters[i][1] = name .. user end
    end
  end

  function pack_grab(grab)
    local under, counted = without_user(grab.under, grab.user), {}
    for i, entry in ipairs(grab.counted) do
      counted[i] = {entry[1], entry[2] == grab.under and 0 or without_user(entry[2], grab.user)}
    end
    return cmsgpack.pack({grab.user, grab.place, grab.quantity, grab.held, grab.taken, grab.redeemed,
      grab.lapsed, grab.deadline, grab.grace, grab.extensions, grab.price, grab.status, grab.ended_seq,
      grab.ended_at, grab.confirmed_seq, grab.confirmed_at, under, counted, grab.payments, grab.codes,
      grab.carried or grab.basket and false, grab.basket})
  end

  function unpack_grab(record)
    spend(COST.grab_read + COST.record_byte * #record)
    local values = cmsgpack.unpack(record)
    local user, under, counted = values[1], values[17], values[18]
    add_user(under, user)
    for _, entry in ipairs(counted) do
      if entry[2] == 0 then entry[2] = under else add_user(entry[2], user) end
    end
    -- All fields are named, so that the table is made in its size.
    return {user = user, place = values[2], quantity = values[3], held = values[4], taken = values[5],
      redeemed = values[6], lapsed = values[7], deadline = values[8], grace = values[9],
      extensions = values[10], price = values[11], status = values[12], ended_seq = values[13],
      ended_at = values[14], confirmed_seq = values[15], confirmed_at = values[16], under = under,
      counted = counted, payments = values[19], codes = values[20], carried = values[21] or nil,
      basket = values[22]}
  end
end

local pack_order, unpack_order
do
  -- The units of a grab that an order used: units 6 (0: taken back), seq 5 and at 5 bytes of the last event
  -- of the order.
  local ORDER = '>I6I5I5'

  function pack_order(quantity, seq, at)
    return struct.pack(ORDER, quantity, seq, at - EPOCH_MS)
  end

  function unpack_order(record)
    local quantity, seq, at = struct.unpack(ORDER, record)
    return {quantity, seq, at + EPOCH_MS}
  end
end
