// Reads a number of records of a topic's partition 0 with franz-go, and prints each as a line of JSON.
//
// Usage: reader BOOTSTRAP TOPIC ISOLATION COUNT [GROUP]
//
// Without a group it reads from the partition's beginning. With a group it goes on where the group
// committed, and commits what it has read before it leaves.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

type header struct {
	Name  string `json:"name"`
	Value []byte `json:"value"`
}

type record struct {
	Offset      int64    `json:"offset"`
	TimestampMs int64    `json:"timestamp_ms"`
	Key         []byte   `json:"key"`
	Value       []byte   `json:"value"`
	Headers     []header `json:"headers"`
}

func main() {
	if err := read(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func read(arguments []string) error {
	if len(arguments) < 4 {
		return fmt.Errorf("usage: reader BOOTSTRAP TOPIC ISOLATION COUNT [GROUP]")
	}
	bootstrap, topic, isolation := arguments[0], arguments[1], arguments[2]
	count, err := strconv.Atoi(arguments[3])
	if err != nil {
		return err
	}
	level := kgo.ReadUncommitted()
	if isolation == "read_committed" {
		level = kgo.ReadCommitted()
	}
	start := kgo.NewOffset().AtStart()
	options := []kgo.Opt{
		kgo.SeedBrokers(bootstrap), kgo.FetchIsolationLevel(level), kgo.ConsumeResetOffset(start),
	}
	inGroup := len(arguments) > 4
	if inGroup {
		options = append(options,
			kgo.ConsumerGroup(arguments[4]), kgo.ConsumeTopics(topic), kgo.DisableAutoCommit())
	} else {
		partition := map[string]map[int32]kgo.Offset{topic: {0: start}}
		options = append(options, kgo.ConsumePartitions(partition))
	}
	client, err := kgo.NewClient(options...)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()

	printed := json.NewEncoder(os.Stdout)
	for read := 0; read < count; {
		fetches := client.PollRecords(ctx, count-read)
		if errors := fetches.Errors(); len(errors) > 0 {
			return fmt.Errorf("after %d records: %w", read, errors[0].Err)
		}
		for _, one := range fetches.Records() {
			if err := printed.Encode(printable(one)); err != nil {
				return err
			}
		}
		read += fetches.NumRecords()
		if inGroup {
			if err := client.CommitRecords(ctx, fetches.Records()...); err != nil {
				return err
			}
		}
	}
	return nil
}

func printable(one *kgo.Record) record {
	headers := make([]header, 0, len(one.Headers))
	for _, each := range one.Headers {
		headers = append(headers, header{each.Key, each.Value})
	}
	return record{one.Offset, one.Timestamp.UnixMilli(), one.Key, one.Value, headers}
}
