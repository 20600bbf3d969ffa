-- Compact binary records: what is remembered of a command, of a user's part, and of a grab. One place that packs and unpacks.

-- Times are kept as 5 bytes of milliseconds since 2020-01-01 (enough until 2054).
local EPOCH_MS = 1577836800000

-- Answer that made an event: code 1, seq 6, at 5, place 4, amount 6, digest 8 bytes; then the offer, where it is not the campaign, or,
-- for what does not fit here, MessagePack {offer, row}, whose first byte no name can have.
-- For a command about the offer itself `place` holds the units left behind it.
local ANSWER, ANSWER_BYTES = '>I1I6I5I4I6c8', 30

local function pack_answer(code, seq, at, place, amount, digest, offer_tail)
  return struct.pack(ANSWER, code, seq, at - EPOCH_MS, place, amount, digest) .. offer_tail
end

-- The answer whose row is kept whole.
local function pack_row(name, row, digest)
  return pack_answer(row[1], row[2], row[3], 0, 0, digest, cmsgpack.pack({name, row}))
end

local function unpack_answer(record)
  local code, seq, at, place, amount, digest = struct.unpack(ANSWER, record)
  return code, seq, at + EPOCH_MS, place, amount, digest
end

-- The offer's name and the row of an answer that is kept whole, or nil.
local function unpack_row(record)
  local first = string.byte(record, ANSWER_BYTES + 1)
  if not first or first < 128 then return nil end
  local kept = cmsgpack.unpack(string.sub(record, ANSWER_BYTES + 1))
  return kept[1], kept[2]
end

-- Refusal: code 1, at 5, digest 8 bytes. What is so already made no event and is kept among them, with seq 6, quantity 6 of what it is.
local function pack_refusal(code, at, digest)
  return struct.pack('>I1I5c8', code, at - EPOCH_MS, digest)
end

local function pack_again(code, seq, at, quantity, digest)
  return pack_refusal(code, at, digest) .. struct.pack('>I6I6', seq, quantity)
end

local function unpack_refusal(record)
  local code, at, digest = struct.unpack('>I1I5c8', record)
  if #record == 14 then return code, at + EPOCH_MS, digest end
  return code, at + EPOCH_MS, digest, struct.unpack('>I6I6', record, 15)
end

-- A user's part of an envelope: place 3, amount 6, seq 5 bytes. 14 bytes fit where 16 would take 24 of Redis' memory.
local PART = '>I3I6I5'
local SEQ_MAX = 2 ^ 40 - 1

local function unpack_part(record)
  local place, amount, seq = struct.unpack(PART, record)
  return place, amount, seq
end

-- A grab of pieces, in this order; see models/rules/state.py for what each means.
local GRAB_FIELDS = {'user', 'place', 'quantity', 'held', 'taken', 'redeemed', 'lapsed', 'deadline', 'grace', 'extensions',
  'price', 'status', 'ended_seq', 'ended_at', 'confirmed_seq', 'confirmed_at', 'under', 'counted', 'payments', 'orders', 'codes'}
local ACTIVE, RELEASED, EXPIRED, WAITING = 0, 1, 2, 3

local function new_grab(user, quantity, under)
  return {user = user, place = 0, quantity = quantity, held = 0, taken = 0, redeemed = 0, lapsed = 0, deadline = 0, grace = 0,
    extensions = 0, price = 0, status = ACTIVE, ended_seq = 0, ended_at = 0, confirmed_seq = 0, confirmed_at = 0, under = under,
    counted = {{quantity, under}},
    payments = {}, orders = {}, codes = {}}
end

local function pack_grab(grab)
  local values = {}
  for i = 1, #GRAB_FIELDS do values[i] = grab[GRAB_FIELDS[i]] end
  return cmsgpack.pack(values)
end

local function unpack_grab(record)
  local values, grab = cmsgpack.unpack(record), {}
  for i = 1, #GRAB_FIELDS do grab[GRAB_FIELDS[i]] = values[i] end
  return grab
end

-- Deletes the answers about an offer among those of its campaign, a step; returns the cursor of the next one, '0' at the end.
local function forget_answers(answers_key, offer, cursor, fields_a_step)
  local found = redis.call('HSCAN', answers_key, cursor, 'COUNT', fields_a_step)
  local gone = {}
  for i = 1, #found[2], 2 do
    local record = found[2][i + 1]
    local name = unpack_row(record) or string.sub(record, ANSWER_BYTES + 1)
    if name == offer then gone[#gone + 1] = found[2][i] end
  end
  if #gone > 0 then redis.call('HDEL', answers_key, unpack(gone)) end
  return found[1]
end
