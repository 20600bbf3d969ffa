-- Executes commands about an offer or a grab: looks up a repeat, refuses or acts, and writes. ARGV[6]
-- msgpack: {offers, campaign of each offer (from 1), campaigns, ids, offer of each command (from 1),
--   digests, bodies}. If a body has `whole`, that text is stored with the answer, and a repeat is compared
--   with it. Commands that do not fit into the call get no row; the caller sends them with its next call.
--- @include "cost"
--- @include "packed_values"
--- @include "decide"
--- @include "repeats"
--- @include "offers"
--- @include "pieces"
--- @include "settling"

local function refused_row(call, code, details)
  return {code = code, at = call.now, details = details}
end

-- The row of a command that has made the last event of the call: about `quantity` units of a grab, or (nil)
-- about the offer itself.
local function done_row(call, offer, code, grab, quantity, details)
  return {code = code, seq = call.seq, at = call.now, amount = quantity, quantity = quantity,
    place = grab and grab.place, left = offer.units_left, details = details}
end

-- Executes all commands of a call; returns the packed reply. Answers and refusals that the call has made for
-- a command id count for later commands of the call with the same id. `act(call, offer, id, digest, body,
-- campaign)` changes the offer and adds events. It returns the row of the answer, and true if the command
-- made an event. `act_without_offer(call, name, id, digest, body, campaign)` does the same where there is no
-- offer. `read()` returns the columns of ARGV[6], if the commands are sent in another form, with bodies as a
-- function of the index. `act_alike(call, commands, i, rows)` then executes commands from the i-th on while
-- they are like most, and adds their packed rows; it returns the index of the first that it left.
local carry_out
do
  -- Remembers the row of a command that made no event; returns the record, or nil when nothing is kept. Where
  -- there is no offer, two rows are not kept: one that names an event of a recorded payment, since the
  -- payment answers every repeat; and one with details (money for which nothing was booked), which is only
  -- counted, since each attempt must get it.
  local function keep_refusal(call, offer, name, field, row, digest)
    if not offer and row.seq then return nil end
    if row.code == CODE.conflict then return nil end
    if not offer and row.details then return count_refusals(call, row.code, name, 1) end
    if row.repeated then
      return remember(call, field, pack_again(row.code, row.seq, row.at, row.quantity, digest, name))
    end
    if row.code > CODE.conflict then return refuse(call, row.code, field, name, digest) end
  end

  -- Executes the i-th command; returns its row.
  local function carry_out_one(call, commands, i, body, act, act_without_offer)
    local id, digest, o = commands.ids[i], commands.digests[i], commands.offer_of[i]
    local name, offer, refusals = commands.names[o], commands.offers[o], commands.refusals
    local campaign = commands.campaigns[commands.campaign_of[o]]
    local field = refusal_field(campaign.name, id)
    local record = campaign.answers[id] or answer_that_counts(call, campaign,
      redis.call('HGET', campaign.answers_key, id))
    local refusal = refusals[field] or refusal_that_counts(call, campaign, field,
      redis.call('HGET', KEYS[3], field))
    local sent = {digest = digest, offer = name, whole = body.whole}
    local row, has_event = repeated_row(record, refusal, sent, call.now, campaign.name, offer and offer.parts)
    local is_repeat = row ~= nil
    row = row or unapproved_row(call, body)
    if not row and not offer then
      row = act_without_offer and act_without_offer(call, name, id, digest, body, campaign)
        or refused_row(call, CODE.no_such_offer)
    elseif not row then
      row, has_event = act(call, offer, id, digest, body, campaign)
    end
    if has_event then
      record = pack_row(name, row, digest, sent.whole)
      keep_answer(campaign, id, record)
    elseif not is_repeat then
      refusals[field] = keep_refusal(call, offer, name, field, row, digest)
    end
    return row
  end

  -- The usual form of the commands.
  local function read_columns()
    spend(COST.argument_byte * #ARGV[6])
    local columns = cmsgpack.unpack(ARGV[6])
    local bodies = columns[7]
    columns[7] = function(i) return bodies[i] end
    return columns
  end

  function carry_out(act, act_without_offer, read, act_alike)
    local call, refused = begin_call()
    if not call then return cmsgpack.pack(refused) end
    local columns, rows = (read or read_columns)(), {}
    local offers, campaigns = load_offers(columns[1], columns[2], columns[3])
    local commands = {names = columns[1], campaign_of = columns[2], ids = columns[4], offer_of = columns[5],
      digests = columns[6], columns = columns, offers = offers, campaigns = campaigns, refusals = {}}
    local i, last = 1, #commands.ids
    while i <= last do
      if act_alike then i = act_alike(call, commands, i, rows) end
      if i > last or i > 1 and is_spent() then break end
      spend(COST.command)
      local row = carry_out_one(call, commands, i, columns[7](i), act, act_without_offer)
      rows[i] = cmsgpack.pack(list_row(row))
      i = i + 1
    end
    return finish(call, offers, campaigns, {}, nil, rows)
  end
end

-- The `act` of `carry_out` for commands about a grab, which `body.grab` names. An expired hold is ended
-- first. A grab of another user than `body.user` does not exist for the command.
local function about_grab(act)
  return function(call, offer, id, digest, body, campaign)
    local grab = grab_of(offer, body.grab)
    if grab then
      lapse(call, offer, body.grab, grab)
      if body.user and body.user ~= grab.user then grab = nil end
    end
    return act(call, offer, grab, id, digest, body, campaign)
  end
end

-- Executes commands about the offer itself. A closed offer refuses all of them.
local function carry_out_for_offer(act)
  return carry_out(function(call, offer, id, digest, body)
    if offer.closed then return refused_row(call, CODE.over) end
    return act(call, offer, id, digest, body)
  end)
end
