-- Compact binary records: what is remembered of a command, and of a user's part. One place that packs and unpacks.

-- Times are kept as 5 bytes of milliseconds since 2020-01-01 (enough until 2054).
local EPOCH_MS = 1577836800000

-- Answer that made an event: code 1, seq 6, at 5, place 4, amount 6, digest 8 bytes; then the offer, where it is not the campaign.
-- For a command about the offer itself `place` holds the units left behind it.
local ANSWER = '>I1I6I5I4I6c8'

local function pack_answer(code, seq, at, place, amount, digest, offer_tail)
  return struct.pack(ANSWER, code, seq, at - EPOCH_MS, place, amount, digest) .. offer_tail
end

local function unpack_answer(record)
  local code, seq, at, place, amount, digest = struct.unpack(ANSWER, record)
  return code, seq, at + EPOCH_MS, place, amount, digest
end

-- Refusal: code 1, at 5, digest 8 bytes.
local function pack_refusal(code, at, digest)
  return struct.pack('>I1I5c8', code, at - EPOCH_MS, digest)
end

local function unpack_refusal(record)
  local code, at, digest = struct.unpack('>I1I5c8', record)
  return code, at + EPOCH_MS, digest
end

-- A user's part of an envelope: place 3, amount 6, seq 5 bytes. 14 bytes fit where 16 would take 24 of Redis' memory.
local PART = '>I3I6I5'
local SEQ_MAX = 2 ^ 40 - 1

local function unpack_part(record)
  local place, amount, seq = struct.unpack(PART, record)
  return place, amount, seq
end
