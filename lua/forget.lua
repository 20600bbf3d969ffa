#!lua flags=allow-oom
-- The answers of an offer that is about to be retired, deleted in bounded steps; those of its campaign's other offers stay.
--
-- Command: none; the sweeper calls it before `sweep`, until the cursor is 0 again.
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list · KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] offer hash · KEYS[12] answers hash of its campaign
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms · ARGV[5] ''
-- ARGV[6] offer · ARGV[7] cursor · ARGV[8] fields a step
-- Outcomes: 21 fenced (whole call)
-- Events: none
-- Returns msgpack: {0, history, {cursor as text}}, or {code, retry_at, message}.
--- @include "shard"
--- @include "records"
--- @include "decide"

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

local offer, cursor = ARGV[6], ARGV[7]
if redis.call('HGET', KEYS[11], 'state') ~= 'closed' then return cmsgpack.pack({0, call.history, {'0'}}) end
return cmsgpack.pack({0, call.history, {forget_answers(KEYS[12], offer, cursor, ARGV[8])}})
