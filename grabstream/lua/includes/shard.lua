-- The state of a shard: its key layout, its server epoch, its clock and its owner.
-- Needs KEYS[1], the shard hash.

-- The layout of keys and records that these scripts read and write. A shard of an older layout is rebuilt
-- from the journal; a shard of a newer layout is left unchanged. Also in lua/keys.py.
local LAYOUT = 1

-- The layout of a shard: 0 if events were decided there, but it names none; nil if it is damaged. A shard
-- without a seq is new.
local function layout_of(named, seq)
  return tonumber(named or (seq and 0 or LAYOUT))
end

-- The number that a field of the shard hash has; nil if it has none, or a value that no script writes:
-- numbers there have at most 15 digits, so that they are exact.
local function number_in(text)
  return text and #text <= 15 and string.find(text, '^%d+$') and tonumber(text) or nil
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
-- change earlier, so it is read in each call.
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

-- The error with which an owner's script does nothing, unless term, owner and server epoch (ARGV[1..3]) are
-- still those of its takeover; nil if they are.
local function lost_ownership()
  local term, owner, epoch = unpack(ARGV, 1, 3)
  local held = redis.call('HMGET', KEYS[1], 'term', 'owner')
  if held[1] == term and held[2] == owner and server_epoch() == epoch then return end
  return redis.error_reply('LOST the shard has another owner, term or server epoch')
end

-- The same for a script of a recovery, which also does nothing while the shard decides.
local function lost_or_deciding()
  return lost_ownership()
    or redis.call('HGET', KEYS[1], 'server_epoch') and redis.error_reply('LOST the shard is not fenced')
end

-- Why the shard needs a takeover: 'incomplete' if its state does not follow from its events, 'outdated' if
-- its keys have an older layout, 'fenced' if it decides nothing for another reason; '' if it decides.
local function fault_for_owner(shard_key, epoch)
  local held = redis.call('HMGET', shard_key, 'partial', 'server_epoch', 'layout', 'seq')
  return held[1] and 'incomplete'
    or (layout_of(held[3], held[4]) or LAYOUT) < LAYOUT and 'outdated'
    or held[2] ~= epoch and 'fenced'
    or ''
end
