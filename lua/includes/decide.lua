-- What every deciding script begins and ends with: may this call decide at all, at what time, and how events are written.
-- Needs KEYS[1..10] (shard, outbox, refusals, refusal_order, demand, due, offers, holds, campaigns, retired) and the includes `shard`
-- and `records`.

-- The outcomes, as models/outcomes.py numbers them. (One table: a script may have 200 locals.)
local CODE = {
  granted = 0, held = 1, confirmed = 2, released = 3, returned = 4, opened = 5, amended = 6, closed = 7, paused = 8, resumed = 9,
  extended = 10, redeemed = 11, unredeemed = 12, loaded = 13, adjusted = 14, waiting = 15,
  invalid = 20, fenced = 21, busy = 22, conflict = 23, no_such_offer = 24, no_such_grab = 25, already_taken = 26, not_open_yet = 27,
  on_hold = 28, over = 29, not_eligible = 30, limit_reached = 31, sold_out = 32, not_enough_left = 33, expired = 34, not_held = 35,
  not_redeemable = 36,
}
local REFUSALS_MAX = 100000
local ENTRY_LINES_MAX = 1000
-- Lua hands over 8000 values at most; what may be longer is written in pieces (an even number, for pairs).
local WRITE_VALUES_MAX = 4000

local function write_in_pieces(command, key, values)
  for from = 1, #values, WRITE_VALUES_MAX do
    redis.call(command, key, unpack(values, from, math.min(from + WRITE_VALUES_MAX - 1, #values)))
  end
end

-- Reads ARGV[1..5] and the shard. Returns the call's state, or nil and the refusal of the whole call {code, retry_at, message}.
--   ARGV[1] shard/shards · ARGV[2] caller's time ms · ARGV[3] time to use instead ms, or '' · ARGV[4] clock skew allowed ms
--   ARGV[5] events the outbox may hold, or '' for commands that must work then too
local function begin_call()
  local clock = time_of_server()
  if ARGV[3] ~= '' then
    clock = tonumber(ARGV[3])
  else
    local skew = clock - tonumber(ARGV[2])
    if math.abs(skew) > tonumber(ARGV[4]) then
      return nil, {CODE.fenced, clock + 1000, string.format(
        'the clock of Redis is %.0f ms ahead of the caller, at most %s allowed: set the clocks right', skew, ARGV[4])}
    end
  end
  local shard = redis.call('HMGET', KEYS[1], 'seq', 'time', 'life', 'history', 'journaled_seq', 'fault', 'shards',
    'layout')
  if shard[3] ~= life_of_server() then
    return nil, {CODE.fenced, clock + 1000, shard[6] or 'the shard has not been reconciled with the journal since this server started'}
  end
  local layout = layout_of(shard[8])
  if layout ~= LAYOUT then
    return nil, {CODE.fenced, clock + 1000, 'the shard has key layout ' .. layout .. ', this program writes ' .. LAYOUT .. ': upgrade it'}
  end
  local number, shards = string.match(ARGV[1], '^(%d+)/(%d+)$')
  if shard[7] ~= shards then
    return nil, {CODE.fenced, clock + 1000,
      'this system has ' .. shard[7] .. ' shards, the caller believes ' .. shards .. ': set GRAB_SHARDS right'}
  end
  local seq = tonumber(shard[1] or 0)
  if seq > SEQ_MAX - 10000 then
    return nil, {CODE.fenced, clock + 1000, 'the shard has had all the events that its records can number'}
  end
  if ARGV[5] ~= '' and seq - tonumber(shard[5] or 0) >= tonumber(ARGV[5]) then
    return nil, {CODE.busy, clock + 1000, 'the outbox is full: the relay is behind'}
  end
  return {
    shard = number, seq = seq, first_seq = seq + 1, history = tonumber(shard[4]),
    now = math.max(clock, tonumber(shard[2] or 0)),
    lines = {}, refused_fields = {}, refused_ids = {}, demand = {},
  }
end

-- The seq of the next event; its line is put at the same place of `call.lines`.
local function next_seq(call)
  call.seq = call.seq + 1
  return call.seq
end

-- The first write of a call, and the only one that can still be refused (an id not above the stream's last).
-- Every line is a value of its own, since joining them in Lua would cost as much as deciding (it hashes every string it makes).
local function append_events(call)
  local count = #call.lines
  if count == 0 then return end
  for from = 1, count, ENTRY_LINES_MAX do
    local fields, n = {}, 0
    for i = from, math.min(from + ENTRY_LINES_MAX - 1, count) do
      fields[n + 1], fields[n + 2] = 'e', call.lines[i]
      n = n + 2
    end
    redis.call('XADD', KEYS[2], string.format('%.0f-0', call.first_seq + from - 1), unpack(fields))
  end
  redis.call('HSET', KEYS[1], 'seq', string.format('%.0f', call.seq), 'time', string.format('%.0f', call.now))
end

-- Remembers a record among the refusals, under its command's field.
local function remember(call, id, record)
  local fields = call.refused_fields
  fields[#fields + 1] = id
  fields[#fields + 1] = record
  call.refused_ids[#call.refused_ids + 1] = id
  return record
end

-- Counts a refusal and remembers it; returns the record.
local function refuse(call, code, id, offer, digest)
  local field = code .. ':' .. offer
  call.demand[field] = (call.demand[field] or 0) + 1
  return remember(call, id, pack_refusal(code, call.now, digest))
end

-- Writes what `refuse` gathered; the oldest beyond REFUSALS_MAX are forgotten.
local function write_refusals(call)
  local count = #call.refused_ids
  if count == 0 then return end
  local second = string.format('%.0f:', math.floor(call.now / 1000))
  for field, number in pairs(call.demand) do redis.call('HINCRBY', KEYS[5], second .. field, number) end
  write_in_pieces('HSET', KEYS[3], call.refused_fields)
  local length = redis.call('RPUSH', KEYS[4], unpack(call.refused_ids))
  if length > REFUSALS_MAX then
    redis.call('HDEL', KEYS[3], unpack(redis.call('LPOP', KEYS[4], length - REFUSALS_MAX)))
  end
end
