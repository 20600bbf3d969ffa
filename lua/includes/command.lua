-- Carries out commands about an offer or a grab: looks up a repeat, refuses or acts, and writes.
-- ARGV[6] msgpack: {offers, campaign of each offer (from 1), campaigns, ids, offer of each command (from 1),
--   digests, bodies}. If a body has `whole`, that text is stored with the answer, and a repeat is compared
--   with it. Commands that do not fit into the call get no row; the caller sends them with its next call.
--- @include "cost"
--- @include "records"
--- @include "decide"
--- @include "repeats"
--- @include "offers"
--- @include "pieces"
--- @include "settling"

local function refused_row(call, code, details)
  return {code, 0, call.now, 0, 0, 0, 0, 0, 0, details}
end

-- Remembers the row of a command that made no event; returns the record, or nil when nothing is kept. Where
-- there is no offer, two rows are not kept: one that names an event of a recorded payment, since the payment
-- answers every repeat; and one with details (money for which nothing was booked), which is only counted,
-- since each attempt must get it.
local function keep_refusal(call, offer, name, field, row, digest)
  if not offer and row[2] > 0 then return nil end
  if row[1] == CODE.conflict then return nil end
  if not offer and row[10] then return count_refusals(call, row[1], name, 1) end
  if row[8] == 1 then
    return remember(call, field, pack_again(row[1], row[2], row[3], row[5], digest, name))
  end
  if row[1] > CODE.conflict then return refuse(call, row[1], field, name, digest) end
end

-- Carries out all commands of a call; returns the packed reply.
-- `act(call, offer, id, digest, body, campaign)` changes the offer and adds events. It returns the row of the
-- answer, and true if the command made an event. `act_without_offer(call, name, id, digest, body, campaign)`
-- does the same where there is no offer.
local function carry_out(act, act_without_offer)
  local call, refused = begin_call()
  if not call then return cmsgpack.pack(refused) end
  local arguments = cmsgpack.unpack(ARGV[6])
  spend(COST.argument_byte * #ARGV[6])
  local names, campaign_of, ids, offer_of = arguments[1], arguments[2], arguments[4], arguments[5]
  local digests, bodies = arguments[6], arguments[7]
  local offers, campaigns = load_offers(names, campaign_of, arguments[3])
  -- Rows that this call has made for a command id count for later commands of the call with the same id.
  local refusals, rows = {}, {}
  for i = 1, #ids do
    if i > 1 and is_spent() then break end
    spend(COST.command)
    local id, digest, o = ids[i], digests[i], offer_of[i]
    local offer, campaign = offers[o], campaigns[campaign_of[o]]
    local field = refusal_field(campaign.name, id)
    local record = campaign.answers[id] or answer_that_counts(call, campaign,
      redis.call('HGET', campaign.answers_key, id))
    local refusal = refusals[field] or refusal_that_counts(call, campaign, field,
      redis.call('HGET', KEYS[3], field))
    local sent = {digest = digest, offer = names[o], whole = bodies[i].whole}
    local row, has_event = repeated_row(record, refusal, sent, call.now, campaign.name, offer and offer.parts)
    local is_repeat = row ~= nil
    if not row and not offer then
      row = act_without_offer and act_without_offer(call, names[o], id, digest, bodies[i], campaign)
        or refused_row(call, CODE.no_such_offer)
    elseif not row then
      row, has_event = act(call, offer, id, digest, bodies[i], campaign)
    end
    if has_event then
      record = pack_row(names[o], row, digest, sent.whole)
      keep_answer(campaign, id, record)
    elseif not is_repeat then
      refusals[field] = keep_refusal(call, offer, names[o], field, row, digest)
    end
    rows[i] = row
  end
  return finish(call, offers, campaigns, rows)
end

-- Carries out commands about a grab, which `body.grab` names. An expired hold is ended first. A grab of
-- another user than `body.user` does not exist for the command.
local function carry_out_for_grab(act, act_without_offer)
  return carry_out(function(call, offer, id, digest, body, campaign)
    local grab = grab_of(offer, body.grab)
    if grab then
      lapse(call, offer, body.grab, grab)
      if body.user and body.user ~= grab.user then grab = nil end
    end
    return act(call, offer, grab, id, digest, body, campaign)
  end, act_without_offer)
end

-- Carries out commands about the offer itself. A closed offer refuses all of them.
local function carry_out_for_offer(act)
  return carry_out(function(call, offer, id, digest, body)
    if offer.closed then return refused_row(call, CODE.over) end
    return act(call, offer, id, digest, body)
  end)
end

local function operator_text(body)
  return body.operator and ',"operator":"' .. body.operator .. '"' or ''
end
