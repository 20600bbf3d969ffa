-- The state of a shard: its key layout, its server epoch, its clock and its owner.
-- Needs KEYS[1], the shard hash.

-- The layouts of keys and records that these scripts read and write: the newest and the oldest. A shard of
-- an older layout is rebuilt from the journal; a shard of a newer layout is left unchanged. 1: subkeys of an
-- offer and a campaign after ':'; 2: after '/', which no id contains; 3: the outbox has runs of grabs; 4: the
-- id of a grab belongs to its user, so a part of an envelope is its own answer, and answers and refusals of
-- other grabs have fields of their own (includes/repeats.lua); 5: all counters of a user are one field
-- (includes/limits.lua). Also in lua/keys.py.
local LAYOUT, LAYOUT_MIN = 5, 2

-- The layout of a shard. Layout 1 was not named in the shard hash. A shard without a seq was never
-- reconciled, so it is new.
local function layout_of(named, seq)
  return tonumber(named or (seq and 1 or LAYOUT_MIN))
end

-- The layout of the shard of this call; `set_layout` sets it before records are read or written, and returns
-- it.
--- @each_call
local key_layout = 0

local function set_layout(named, seq)
  key_layout = layout_of(named, seq)
  return key_layout
end

-- The number that a field of the shard hash has; nil if it has none, or what no script writes: numbers there
-- have at most 15 digits, so that they are exact.
local function number_in(text)
  return text and #text <= 15 and string.find(text, '^%d+$') and tonumber(text) or nil
end

-- The layout in which an operator wants the shard to be rebuilt, if these scripts write it; else 0, also for
-- what is no number.
local function raised_layout_of(named)
  local raised = tonumber(named or '') or 0
  return raised <= LAYOUT and raised or 0
end

-- The number of seqs that the lines of an entry of the outbox take. The field of a line is 'e', or the number
-- of grabs of the run that the line has.
local function seqs_of(fields)
  local seqs = 0
  for i = 1, #fields, 2 do seqs = seqs + (tonumber(fields[i]) or 1) end
  return seqs
end

-- A server's epoch is its run id and its replication id: the run id changes at a restart, the replication id
-- at every promotion. A library, and so `run_id`, ends with its server's process; the replication id may
-- change before, so it is read in each call.
local server_epoch
do
  local run_id

  function server_epoch()
    run_id = run_id or string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
    local replication_id = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
    return run_id .. replication_id
  end
end

-- Milliseconds since 1970 UTC by this server's clock.
local function time_of_server()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Whether term, owner and server epoch are still those of the caller's takeover; otherwise the owner's
-- scripts do nothing.
local function is_owner(shard_key, term, owner, epoch)
  local held = redis.call('HMGET', shard_key, 'term', 'owner')
  return held[1] == term and held[2] == owner and server_epoch() == epoch
end
