-- The start and end of every deciding script: whether this call may decide, at what time, and the writing of
-- events. Needs KEYS[1..12] (shard, outbox, refusals, refusal_order, demand, due, offers, holds, campaigns,
-- retired, past, cleaning).
--- @include "cost"
--- @include "shard"
--- @include "packed_values"
--- @include "runs"

-- The outcomes, numbered as in models/outcomes.py. They are in one table because a script may have at most
-- 200 locals.
local CODE = {
  granted = 0, held = 1, confirmed = 2, released = 3, returned = 4, opened = 5, amended = 6, closed = 7,
  paused = 8, resumed = 9,
  extended = 10, redeemed = 11, unredeemed = 12, loaded = 13, adjusted = 14, waiting = 15,
  invalid = 20, fenced = 21, busy = 22, conflict = 23, no_such_offer = 24, no_such_grab = 25,
  already_taken = 26, not_open_yet = 27,
  on_hold = 28, over = 29, not_eligible = 30, limit_reached = 31, sold_out = 32, not_enough_left = 33,
  expired = 34, not_held = 35,
  not_redeemable = 36,
  -- Not an outcome: the shard has another history than the call names, and the gate must first send the
  -- earlier commands of the same callers again. The reply has the shard's present history.
  another_history = -1,
}
-- The bounds of models/bounds.py. A script tests a bound, and refuses what exceeds it, before it changes
-- anything.
local BOUNDS = {
  seq = 2 ^ 40 - 1, event_line_bytes = 262144, codes_per_grab = 100, basket_grabs = 10, entry_lines = 1000,
  entry_bytes = 131072, refusals = 100000,
  basket_answers_bytes = 1048576, large_answer_bytes = 1024, with_codes = 'at most 100 where grabs get codes',
}
-- Lua passes at most 8000 values to a function; longer lists are written in pieces of an even number, since
-- values may be pairs.
local WRITE_VALUES_MAX = 4000

-- A call first notes its writes; `commit` executes them at the end. After the first write a script reads and
-- computes nothing more. So a call either fails before it changes anything, or succeeds. Only begin_call
-- writes at once: it fences a shard that has a damaged number, and then nothing is decided.
--- @each_call
local writes = {}

local function write(...)
  local words = {...}
  for i = 1, select('#', ...) do
    if type(words[i]) ~= 'string' and type(words[i]) ~= 'number' then
      error('word ' .. i .. ' of ' .. words[1] .. ' is missing')
    end
  end
  writes[#writes + 1] = words
end

local function write_in_pieces(command, key, values)
  for from = 1, #values, WRITE_VALUES_MAX do
    writes[#writes + 1] = {command, key, unpack(values, from, math.min(from + WRITE_VALUES_MAX - 1, #values))}
  end
end

-- Executes the noted writes. With valid data none of them fails.
local commit
do
  -- Fences the shard and records it as incomplete: a write failed after another had succeeded, or the outbox
  -- is ahead of the shard's seq. The shard's relay journals the events in the outbox, then rebuilds the
  -- shard.
  local function break_off(words)
    local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
    local seq = last and tonumber(string.match(last[1], '^%d+')) + seqs_of(last[2]) - 1 or 0
    redis.call('HDEL', KEYS[1], 'server_epoch', 'history')
    redis.call('HSET', KEYS[1], 'partial', '1', 'fault', 'a script failed while it wrote: ' .. words,
      'seq', string.format('%d', math.max(seq, tonumber(redis.call('HGET', KEYS[1], 'seq') or 0))))
    error({err = 'BROKEN OFF ' .. words})
  end

  function commit()
    local done = 0
    local succeeded, problem = pcall(function()
      for i = 1, #writes do
        redis.call(unpack(writes[i]))
        done = i
      end
    end)
    writes = {}
    if succeeded then return end
    local words = type(problem) == 'table' and problem.err or tostring(problem)
    if done > 0 or string.find(words, 'equal or smaller', 1, true) then break_off(words) end
    -- Nothing was written, and no command caused it: the shard's keys, or its server, cannot be written.
    error({err = 'UNWRITTEN ' .. words})
  end
end

-- Reads ARGV[1..5] and the shard. Returns the call's state, or nil and the refusal of the whole call {code,
-- retry_at, message}.
--   ARGV[1] shard/shards, or shard/shards/history/seq, either of which may be empty. The history is given
--     when callers of this call have earlier commands that were decided in it and are not known to be
--     journaled. In another history those decisions may be lost, and no later command of the same callers may
--     be decided before them. The seq is that of an earlier command whose event is journaled: a server that
--     has less lags behind the journal, such as a former master in a divided network.
--   ARGV[2] the caller's time, ms
--   ARGV[3] a time to use in place of the server's, ms, or ''. Only a shard whose field `clock` is 'caller'
--     accepts one: a shard of a test or a rehearsal (let_callers_set_time in lua/server.py)
--   ARGV[4] allowed clock skew, ms
--   ARGV[5] the number of events at which the outbox is full, or '' for commands that a full outbox must take
local begin_call
do
  -- What repairs a damaged number. The relay of the shard does the rest automatically.
  local MENDED = {
    seq = 'delete it, then the shard is rebuilt from the journal',
    journaled_seq = 'delete it, then the shard is rebuilt from the journal',
    layout = 'set it to that of another shard',
  }

  -- Fences a shard whose hash has a damaged number, and records it as incomplete, so that it is rebuilt from
  -- the journal, unless it is the layout. Returns the reason and the fix in words; nil if nothing is damaged.
  -- `shard` is what begin_call reads.
  local function fence_damaged(shard)
    local damaged = not number_in(shard[1] or '0') and 'seq'
      or not number_in(shard[5] or '0') and 'journaled_seq'
      or (not number_in(shard[2] or '0') or #(shard[2] or '') > 13) and 'time'
      or not number_in(shard[4]) and 'history'
      or shard[8] and not number_in(shard[8]) and 'layout'
      or not number_in(shard[7]) and 'shards'
    if not damaged then return nil end
    local reason = 'the field ' .. damaged .. ' of the shard (' .. KEYS[1]
      .. ') has a value that no program writes: '
      .. (MENDED[damaged] or 'the shard is rebuilt from the journal')
    redis.call('HDEL', KEYS[1], 'server_epoch', 'history')
    redis.call('HSET', KEYS[1], 'fault', reason)
    -- With a damaged layout, nothing changes: an operator corrects it, and the outbox is kept.
    if damaged ~= 'layout' then redis.call('HSET', KEYS[1], 'partial', '1') end
    return reason
  end

  function begin_call()
    local clock = time_of_server()
    if ARGV[3] ~= '' then
      if redis.call('HGET', KEYS[1], 'clock') ~= 'caller' then
        return nil, {CODE.fenced, clock + 1000,
          'a caller names a time to decide at, which only shards of tests and rehearsals accept'}
      end
      clock = tonumber(ARGV[3])
    else
      local skew = clock - tonumber(ARGV[2])
      if math.abs(skew) > tonumber(ARGV[4]) then
        return nil, {CODE.fenced, clock + 1000, string.format(
          'the clock of Redis is %d ms ahead of the caller, at most %s allowed: correct the clocks', skew,
            ARGV[4])}
      end
    end
    local shard = redis.call('HMGET', KEYS[1], 'seq', 'time', 'server_epoch', 'history', 'journaled_seq',
      'fault',
      'shards',
      'layout')
    if shard[3] ~= server_epoch() then
      return nil, {CODE.fenced, clock + 1000, shard[6]
        or 'the shard has not been reconciled with the journal since this server started'}
    end
    local damaged = fence_damaged(shard)
    if damaged then return nil, {CODE.fenced, clock + 1000, damaged} end
    local layout = layout_of(shard[8], shard[1])
    if layout ~= LAYOUT then
      return nil, {CODE.fenced, clock + 1000, 'the shard has key layout ' .. layout
        .. ', this program writes layout ' .. LAYOUT
        .. (layout > LAYOUT and ': upgrade it' or ': the next takeover rebuilds the shard')}
    end
    local number, shards, history, journaled = string.match(ARGV[1], '^(%d+)/(%d+)/?(%d*)/?(%d*)$')
    if shard[7] ~= shards then
      return nil, {CODE.fenced, clock + 1000,
        'this system has ' .. shard[7] .. ' shards, the caller assumes ' .. shards
          .. ': correct GRAB_SHARDS'}
    end
    local seq = tonumber(shard[1] or 0)
    if journaled ~= '' and tonumber(journaled) > seq then
      return nil, {CODE.fenced, clock + 1000, 'this server lags behind the journal: the shard has seq '
        .. (shard[1] or 0) .. ' here, and seq ' .. journaled .. ' is journaled'}
    end
    if history ~= '' and history ~= shard[4] then
      return nil, {CODE.another_history, tonumber(shard[4]), 'the shard was recovered: history ' .. shard[4]
        .. ' instead of ' .. history}
    end
    if seq > BOUNDS.seq - 10000 then
      return nil, {CODE.fenced, clock + 1000,
        'the shard has reached the greatest event number that its records can hold'}
    end
    if ARGV[5] ~= '' and seq - tonumber(shard[5] or 0) >= tonumber(ARGV[5]) then
      return nil, {CODE.busy, clock + 1000, 'the outbox is full: the relay lags'}
    end
    return {
      shard = number, seq = seq, first_seq = seq + 1, history = tonumber(shard[4]),
      now = math.max(clock, tonumber(shard[2] or 0)),
      lines = {}, seqs = {}, joined = {}, refused_fields = {}, refused_ids = {}, demand = {}, retired = {},
      in_order = {},
    }
  end
end

-- Whether an offer has retired. Records that name a retired offer count as forgotten, even if they are not
-- deleted yet.
local function has_retired(call, name)
  local retired = call.retired[name]
  if retired == nil then
    retired = redis.call('SISMEMBER', KEYS[10], name) == 1
    call.retired[name] = retired
  end
  return retired
end

-- Adds the text of an event; its cost is by its bytes. `joined`: it was decided together with the event
-- before it, so both are in one entry of the outbox. The relay keeps them in one record of the journal
-- (streams/relaying/blocks.py).
local function add_line(call, text, joined)
  end_run(call)
  spend(COST.line_byte * #text)
  call.lines[#call.lines + 1] = text
  call.joined[#call.lines] = joined
end

-- Notes the first write of a call, the only one that can still be refused (when its id is not above the last
-- id of the stream). `call.seqs` has the number of seqs of each line that is a run. Every line is a separate
-- value: joining lines in Lua would cost as much as deciding, since Lua hashes every string that it makes.
local function append_events(call)
  end_run(call)
  local count, lines, from, seq = #call.lines, call.lines, 1, call.first_seq
  if count == 0 then return end
  -- The bounds of commands keep lines short enough. A longer line would stop its shard, so this raises before
  -- anything is written.
  local line_bytes, entry_lines, entry_bytes = BOUNDS.event_line_bytes, BOUNDS.entry_lines, BOUNDS.entry_bytes
  for i = 1, count do
    if #lines[i] > line_bytes then
      error('LINE an event has ' .. #lines[i] .. ' bytes, more than the ' .. line_bytes .. ' allowed')
    end
  end
  while from <= count do
    local fields, n, i, bytes, first_seq = {}, 0, from, 0, seq
    repeat
      local seqs = call.seqs[i]
      fields[n + 1], fields[n + 2] = seqs or 'e', lines[i]
      n, bytes, i, seq = n + 2, bytes + #lines[i], i + 1, seq + (seqs or 1)
    until i > count
      or not call.joined[i] and (i - from >= entry_lines or bytes + #lines[i] > entry_bytes)
    writes[#writes + 1] = {'XADD', KEYS[2], string.format('%d-0', first_seq), unpack(fields)}
    from = i
  end
  write('HSET', KEYS[1], 'seq', string.format('%d', call.seq), 'time', string.format('%d', call.now))
end

-- Adds a record to the refusals, under the field of its command.
local function remember(call, id, record)
  local fields = call.refused_fields
  fields[#fields + 1] = id
  fields[#fields + 1] = record
  -- If the field holds a record already (of a retired offer, or of a basket that is decided again because
  -- another record of it was deleted), the new record keeps its position in the order.
  if not call.in_order[id] then call.refused_ids[#call.refused_ids + 1] = id end
  return record
end

-- Counts refusals. Offers that do not exist are counted together under '*': otherwise a client that invents
-- names would fill the hash, and the table in SQL that it is copied to.
local function count_refusals(call, code, offer, count)
  local field = code .. ':' .. (code == CODE.no_such_offer and '*' or offer)
  if count > 0 then call.demand[field] = (call.demand[field] or 0) + count end
end

-- Counts a refusal and remembers it; returns the record. A refusal about a retired offer is not remembered.
local function refuse(call, code, id, offer, digest)
  count_refusals(call, code, offer, 1)
  return not has_retired(call, offer) and remember(call, id, pack_refusal(code, call.now, digest, offer))
    or nil
end

-- Notes the writes for all calls of `refuse`. The oldest refusals beyond BOUNDS.refusals are deleted.
local function write_refusals(call)
  local second = string.format('%d:', math.floor(call.now / 1000))
  for field, number in pairs(call.demand) do write('HINCRBY', KEYS[5], second .. field, number) end
  write_in_pieces('HSET', KEYS[3], call.refused_fields)
  local count = #call.refused_ids
  if count == 0 then return end
  write_in_pieces('RPUSH', KEYS[4], call.refused_ids)
  local beyond = redis.call('LLEN', KEYS[4]) + count - BOUNDS.refusals
  if beyond > 0 then
    local oldest = redis.call('LRANGE', KEYS[4], 0, beyond - 1)
    for i = 1, beyond - #oldest do oldest[#oldest + 1] = call.refused_ids[i] end
    write_in_pieces('HDEL', KEYS[3], oldest)
    write('LTRIM', KEYS[4], beyond, -1)
  end
end
